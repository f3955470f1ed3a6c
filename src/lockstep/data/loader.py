"""Gives each rank its micro-batches: of training steps by the sample plan, of an evaluation in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np

from lockstep.data.alignment import aligned
from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.inline import InlineReading, Reading, Request
from lockstep.data.keyed import EVALUATION_EPOCH
from lockstep.data.planned import planned_steps
from lockstep.data.reader import Collate, SampleReader
from lockstep.data.workers import WorkerReading
from lockstep.errors import ConfigError
from lockstep.permutation import Indices
from lockstep.plan import SamplePlan, Share, StepPlan

_ALL = Share()


class StepLoader:
    """Reads this rank's micro-batches of each training step.

    Args:
        dataset: any map-style data set.
        plan: which samples each micro-batch of each step holds.
        share: which micro-batches of each step are this rank's.
        seed: the run's seed; with epoch and index it decides every random draw of a sample.
        workers: processes that read ahead; 0 reads when asked. A data set in memory is never read by workers.
        collate: makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``.
        prefetch: steps that may be read ahead.
        pin_memory: deliver tensors in page-locked memory, for asynchronous copies to CUDA.
        timeout: seconds to wait for one micro-batch of a worker.
    """

    def __init__(
        self,
        dataset: Any,
        plan: SamplePlan,
        *,
        share: Share = _ALL,
        seed: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        timeout: float = 120.0,
    ) -> None:
        _check_size(dataset, plan.samples)
        self._plan, self._share = plan, share
        per_step = len(share.of(plan.shape.micro_batches))
        self._reading = open_reading(
            dataset,
            seed=seed,
            workers=workers,
            collate=collate,
            ahead=prefetch * per_step,
            pin_memory=pin_memory,
            timeout=timeout,
        )

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yields the steps of ``epoch`` from position ``first``, one ``Batch`` each.

        Leaving the loop early is fine; beginning another iteration ends this one.
        """
        ahead, steps = tee(planned_steps(self._plan, epoch, first))
        if self._share.holder is None:
            yield from (Batch(step, ()) for step in steps)
            return  # and start no workers
        results = self._reading.read(_requests(ahead, self._share))
        for step in steps:
            parts = (
                MicroBatch(k, indices, aligned(next(results))) for k, indices in _parts(step, self._share)
            )
            yield Batch(step, tuple(parts))

    def close(self) -> None:
        """Ends the worker processes, if any. The loader can be used again."""
        self._reading.close()


class EvaluationLoader:
    """Reads every sample exactly once, in index order, each rank its share of the micro-batches.

    The random draws of a sample are keyed without the epoch, so every evaluation sees the same samples.

    Args:
        dataset: any map-style data set.
        micro_batch_size: samples of a micro-batch; the last one of the set may be smaller.
        share: which micro-batches of the set are this rank's; there may be none.
        seed: the run's seed.
        workers: processes that read ahead; 0 reads when asked. A data set in memory is never read by workers.
        collate: makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``.
        prefetch: micro-batches that each worker may be ahead.
        pin_memory: deliver tensors in page-locked memory, for asynchronous copies to CUDA.
        timeout: seconds to wait for one micro-batch of a worker.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        share: Share = _ALL,
        seed: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        timeout: float = 120.0,
    ) -> None:
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size={micro_batch_size} must be at least 1.")
        self._samples = _size(dataset)
        self._micro_batch_size = micro_batch_size
        self.count = -(-self._samples // micro_batch_size)
        """Micro-batches of the set, over all ranks."""
        self._held = share.of(self.count)
        self._reading = open_reading(
            dataset,
            seed=seed,
            workers=workers,
            collate=collate,
            ahead=prefetch * workers,
            pin_memory=pin_memory,
            timeout=timeout,
        )

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches; ``k`` numbers those of the set, and spares from ``count`` on."""
        parts = [_Slice(k, self._micro_batch_size, self._samples, k >= self.count) for k in self._held]
        if not parts:
            return  # and start no workers
        results = self._reading.read(Request(EVALUATION_EPOCH, part.indices) for part in parts)
        for part in parts:
            yield MicroBatch(part.k, part.indices, aligned(next(results)))

    def close(self) -> None:
        """Ends the worker processes, if any. The loader can be used again."""
        self._reading.close()


@dataclass(frozen=True, slots=True)
class _Slice:
    """Micro-batch ``k`` of a set that is read in order."""

    k: int
    size: int
    samples: int
    spare: bool = False

    @property
    def indices(self) -> Indices:
        first = 0 if self.spare else self.k * self.size
        return np.arange(first, min(first + self.size, self.samples), dtype=np.int64)


def _requests(steps: Iterator[StepPlan], share: Share) -> Iterator[Request]:
    """The micro-batches of one holder, in order. Knows no loader, so a forgotten loader is freed at once."""
    for step in steps:
        for _, indices in _parts(step, share):
            yield Request(step.epoch, indices)


def _parts(step: StepPlan, share: Share) -> Iterator[tuple[int, Indices]]:
    """Number and samples of each of a holder's micro-batches; a spare has those of micro-batch 0."""
    for k in share.of(step.leaves):
        yield k, step.indices[k if k < step.leaves else 0]


def open_reading(
    dataset: Any,
    *,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    ahead: int = 2,
    pin_memory: bool = False,
    timeout: float = 120.0,
) -> Reading:
    """The way to read a data set: in worker processes if there are any and the set is not in memory, else
    here.

    Args:
        dataset: any map-style data set.
        seed: the run's seed.
        workers: number of worker processes.
        collate: makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``.
        ahead: micro-batches that may be read ahead by all workers together; each is kept busy with two at
            least.
        pin_memory: deliver tensors in page-locked memory.
        timeout: seconds to wait for one micro-batch of a worker.
    """
    if workers < 0:
        raise ConfigError(f"workers={workers} must be 0 (read in the training process) or more.")
    reader = SampleReader(dataset, seed=seed, collate=collate)
    if workers == 0 or reader.in_memory:
        return InlineReading(reader, pin_memory=pin_memory)
    return WorkerReading(
        SampleReader(dataset, seed=seed, collate=collate, keep_generators=False),
        workers=workers,
        ahead=max(2, -(-ahead // workers)),
        pin_memory=pin_memory,
        timeout=timeout,
    )


def _size(dataset: Any) -> int:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"{type(dataset).__name__} has no length and no access by number, which a plan of samples needs. "
            "Give a map-style data set, with __len__ and __getitem__."
        )
    return len(dataset)


def _check_size(dataset: Any, planned: int) -> None:
    if _size(dataset) != planned:
        raise ConfigError(
            f"The plan is for {planned} samples and the data set has {_size(dataset)}. "
            "Make the plan with samples=len(dataset)."
        )
