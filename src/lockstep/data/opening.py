"""Chooses who reads a data set: worker processes, or the training process itself."""

from __future__ import annotations

from typing import Any

from lockstep.data.inline import InlineReading, Reading
from lockstep.data.read_clock import ReadClock
from lockstep.data.reader import Collate, SampleReader
from lockstep.data.workers import WorkerReading
from lockstep.errors import ConfigError

_READ_AHEAD = 1 << 19
"""Bytes of small steps that are taken from memory at once; what is read fits into a core's cache."""


def open_reading(
    dataset: Any,
    *,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    ahead: int = 2,
    per_step: int = 1,
    rows: int = 1,
    pin_memory: bool = False,
    timeout: float = 120.0,
    clock: ReadClock | None = None,
) -> Reading:
    """The way to read a data set: in worker processes if there are any and the set is not in memory, else here.

    Args:
        dataset: any map-style data set.
        seed: the run's seed.
        workers: number of worker processes.
        collate: makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``.
        ahead: micro-batches that may be read ahead by all workers together; each is kept busy with two at
            least.
        pin_memory: deliver tensors in page-locked memory.
        per_step: micro-batches of a step that this process reads; see ``Reading.at_a_time``.
        rows: samples of a micro-batch.
        timeout: seconds to wait for one answer of a worker: a micro-batch, or its part of a step that is read together.
        clock: notes when each micro-batch is read.
    """
    if workers < 0:
        raise ConfigError(f"workers={workers} must be 0 (read in the training process) or more.")
    reader = SampleReader(dataset, seed=seed, collate=collate, clock=clock)
    if workers == 0 or reader.in_memory:
        return InlineReading(
            reader, per_step=per_step, steps=_steps(reader, per_step * rows), pin_memory=pin_memory
        )
    at_a_time = -(-per_step // workers) if reader.stand_alone else 1  # then each worker answers once a step
    return WorkerReading(
        SampleReader(dataset, seed=seed, collate=collate, keep_generators=False, clock=clock),
        workers=workers,
        ahead=max(2, -(-ahead // (workers * at_a_time))),
        at_a_time=at_a_time,
        pin_memory=pin_memory,
        timeout=timeout,
    )


def _steps(reader: SampleReader, rows: int) -> int:
    """How many steps of so many rows are read at once, where the set is in memory and that is known to cost less."""
    return max(1, _READ_AHEAD // (reader.row_bytes * rows)) if reader.row_bytes else 1
