"""torch.distributed.pipelining as its documentation has it: stages cut by hand, 1F1B, W micro-batches."""

from __future__ import annotations

import torch
from harness.workloads import Arguments, read_arguments
from plain import Step, loop, world
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def build(given: Arguments) -> Step:
    rank, world_size = world()
    stage_module = stages(given.workload.build_model(), world_size)[rank]
    optimizer = given.workload.build_optimizer(stage_module)
    stage = PipelineStage(stage_module, rank, world_size, torch.device("cpu"))
    micro_batches = given.micro_batches or world_size
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=given.workload.loss)

    def step(inputs: Tensor, targets: Tensor) -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == world_size - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def stages(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's layers in consecutive groups with about as many parameters each."""
    layers = [part for name, child in model.named_children() for part in (child if name == "blocks" else [child])]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    before, total = 0, sum(sizes)
    for layer, size in zip(layers, sizes):
        groups[min(count - 1, int((before + size / 2) * count / total))].append(layer)
        before += size
    return [nn.Sequential(*group) for group in groups]


if __name__ == "__main__":
    loop(read_arguments(), build, shared_batch=True)
