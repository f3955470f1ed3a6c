"""DistributedDataParallel as torch's tutorial has it; micro-batches under ``no_sync``, each reduced, or none."""

from __future__ import annotations

from contextlib import nullcontext

from harness.workloads import Arguments, read_arguments
from plain import Step, loop, parts
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def build(given: Arguments) -> Step:
    model = given.workload.build_model()
    optimizer = given.workload.build_optimizer(model)
    wrapped = model if given.accumulate == "alone" else DistributedDataParallel(model)

    def step(inputs: Tensor, targets: Tensor) -> None:
        micro_batches = parts(given, inputs, targets)
        for number, (own, wanted) in enumerate(micro_batches, 1):
            waits = number < len(micro_batches) and given.accumulate == "no_sync"
            with wrapped.no_sync() if waits else nullcontext():
                (given.workload.loss(wrapped(own), wanted) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    loop(read_arguments(), build)
