"""The parts that the plain sides share: the process group, a rank's batches, and the loop of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch.distributed as dist
from harness.gate import Gate, forget_peak
from harness.workloads import Arguments, build_loader
from torch import Tensor
from torch.utils.data import DistributedSampler

Step = Callable[[Tensor, Tensor], None]
"""One optimizer step on a rank's inputs and targets."""


def world() -> tuple[int, int]:
    """Rank and number of processes, as torchrun says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def parts(given: Arguments, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A rank's micro-batches of one step."""
    count = max(1, given.micro_batches // world()[1])
    return list(zip(inputs.chunk(count), targets.chunk(count)))


def loop(given: Arguments, build: Callable[[Arguments], Step], *, shared_batch: bool = False) -> None:
    """Builds the training under the memory count and steps when the harness says so.

    ``shared_batch``: every rank reads the whole global batch, as the stages of a pipeline do.
    """
    rank, world_size = world()
    dist.init_process_group("gloo")
    before = forget_peak()
    step = build(given)
    gate = Gate(given.control, rank, before)
    for inputs, targets in _batches(given, 0 if shared_batch else rank, 1 if shared_batch else world_size):
        step(inputs, targets)
        if not gate.step_done():
            break
    dist.destroy_process_group()


def _batches(given: Arguments, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    dataset = given.workload.build_data(given.fetch)
    sampler: DistributedSampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = build_loader(dataset, given.workload.global_batch // world_size, sampler=sampler)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        yield from loader
