"""FSDP2 as torch's tutorial has it: ``fully_shard`` on every block, then on the model; reduces every micro-batch."""

from __future__ import annotations

from harness.workloads import Arguments, read_arguments
from plain import Step, loop, parts, world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(given: Arguments) -> Step:
    model = given.workload.build_model()
    mesh = init_device_mesh("cpu", (world()[1],))
    for name, child in model.named_children():
        for part in child if name == "blocks" else [child]:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, nn.Module)
    optimizer = given.workload.build_optimizer(model)

    def step(inputs: Tensor, targets: Tensor) -> None:
        micro_batches = parts(given, inputs, targets)
        for own, wanted in micro_batches:
            (given.workload.loss(model(own), wanted) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    loop(read_arguments(), build)
