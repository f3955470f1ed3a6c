"""DistributedDataParallel as torch's tutorial has it."""

from __future__ import annotations

from harness.workloads import Arguments, read_arguments
from plain import Step, loop
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def build(given: Arguments) -> Step:
    model = DistributedDataParallel(given.workload.build_model())
    optimizer = given.workload.build_optimizer(model)

    def step(inputs: Tensor, targets: Tensor) -> None:
        given.workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    loop(read_arguments(), build)
