"""Gives each rank its micro-batches: of training steps by the sample plan, of an evaluation in index order.

Planner      computes the steps of the plan, many at a time: the keyed permutation costs about 100 microseconds a
             call, nearly the same for 16 samples as for 1,000
StepLoader, EvaluationLoader   read what the rank's share of the plan names
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, tee
from typing import Any, Generic, TypeVar, Unpack

import numpy as np
from torch.utils.data import default_collate

from lockstep.core.plan import Indices, SamplePlan, Share, StepPlan
from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.keyed import EVALUATION_EPOCH
from lockstep.data.naming import require_map_style, unwrap_subset
from lockstep.data.reader import Request
from lockstep.data.workers import Reading, ReadingOptions, WorkerReading, open_reading
from lockstep.data.wrappers.skipping import SkipBroken
from lockstep.data.wrappers.wrapping import Wrapping, behind
from lockstep.errors import ConfigError

_SAMPLES_AT_ONCE = 8192
_MOST_APART = 4


def planned_steps(plan: SamplePlan, epoch: int, first: int = 0) -> Iterator[StepPlan]:
    """Yields ``plan.step(epoch, position)`` for every position from ``first`` to the end of the epoch."""
    count = max(1, _SAMPLES_AT_ONCE // plan.shape.global_batch)
    steps = plan.steps_per_epoch
    for begin in range(first, steps, count):
        yield from plan.steps(epoch, begin, min(begin + count, steps))


class Planner:
    """The steps of any epoch of a plan; where epochs are short, those of the next few are computed with one.

    A call after another one costs a quarter of a call after a training step, which has emptied the core's caches. The
    first call computes one epoch, each later one twice as many as the one before: a run may have few.
    """

    def __init__(self, plan: SamplePlan) -> None:
        self._plan = plan
        self._most = _SAMPLES_AT_ONCE // plan.samples
        self._next = 1
        self._ready: dict[int, list[StepPlan]] = {}

    def steps(self, epoch: int, first: int = 0) -> Iterator[StepPlan]:
        """Yields ``plan.step(epoch, position)`` for every position from ``first`` to the end of the epoch."""
        if self._most < 2:
            return planned_steps(self._plan, epoch, first)
        if epoch not in self._ready:
            count = self._plan.steps_per_epoch
            self._ready = {n: self._plan.steps(n, 0, count) for n in range(epoch, epoch + self._next)}
            self._next = min(2 * self._next, self._most)
        return iter(self._ready[epoch][first:])


Position = TypeVar("Position")
Opened = TypeVar("Opened")


class _Prefetching(ABC, Generic[Position, Opened]):
    """A loader, and at most one iteration of it that was started before it was asked for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._kept: tuple[Position, Opened] | None = None

    def _keep(self, position: Position) -> None:
        """Starts to read at a position, unless that was done already."""
        if self._kept is None or self._kept[0] != position:
            self._kept = position, self._open(position)

    def _take(self, position: Position) -> Opened:
        """The iteration started at this position; a new one if there is none, or a worker has died since."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == position and self._reading.sound:
            return kept[1]
        return self._open(position)

    @abstractmethod
    def _open(self, position: Position) -> Opened:
        """Starts to read at a position."""

    def close(self) -> None:
        """Ends the worker processes, if any. The loader can be used again."""
        self._kept = None
        self._reading.close()


_ALL = Share()
_Held = tuple[StepPlan, list[tuple[int, Indices]]]
"""A step, and number and samples of each of a holder's micro-batches; a spare has the samples of micro-batch 0."""


class StepLoader(_Prefetching[tuple[int, int], tuple[Iterator[_Held], Iterator[Any], bool]]):
    """Reads this rank's micro-batches of each training step.

    Args:
        dataset: any map-style data set.
        plan: which samples each micro-batch of each step holds.
        share: which micro-batches of each step are this rank's.
        prefetch: steps that may be read ahead.
        options: who reads and how: ``seed``, ``workers``, ``collate``, ``gpus``, ``timeout`` and ``trace``, see
            ``lockstep.data.workers.ReadingOptions``.
    """

    def __init__(
        self,
        dataset: Any,
        plan: SamplePlan,
        *,
        share: Share = _ALL,
        prefetch: int = 2,
        **options: Unpack[ReadingOptions],
    ) -> None:
        require_map_style(dataset, "StepLoader")
        if len(dataset) != plan.samples:
            raise ConfigError(
                f"The plan is for {plan.samples} samples and the data set has {len(dataset)}. "
                "Make the plan with samples=len(dataset)."
            )
        self.counts_skipped = isinstance(unwrap_subset(dataset)[0], SkipBroken)
        """True if broken samples are skipped and counted, epoch by epoch."""
        self._plan, self._share, self._planner = plan, share, Planner(plan)
        self._wrapped = dataset if isinstance(dataset, Wrapping) else None
        count, rows = len(share.of(plan.shape.micro_batches)), plan.shape.micro_batch_size
        collate = options.get("collate") if options.get("checks") and not self.counts_skipped else None
        self._reads_apart = collate not in (None, default_collate)
        super().__init__(open_reading(dataset, prefetch=prefetch * count, per_step=max(1, count), rows=rows, **options))

    def batches(self, epoch: int, first: int = 0, at_end: Callable[[], None] | None = None) -> Iterator[Batch]:
        """Yields the steps of ``epoch`` from position ``first``, one ``Batch`` each.

        Leaving the loop early is fine; beginning another iteration ends this one.

        Args:
            at_end: called when the last step has been read and is about to be given: the workers are free.
        """
        if self._share.holder is None:
            yield from (Batch(self._named(step), ()) for step in self._planner.steps(epoch, first))
            return  # and start no workers
        steps, results, reads_apart = self._take((epoch, first))
        last = self._plan.steps_per_epoch - 1
        for step, held in steps:
            parts = tuple([MicroBatch(k, indices, next(results)) for k, indices in held])
            apart = next(results) if reads_apart and _asks_apart(step, held, self._reading.at_a_time) else ()
            self._reads_apart = reads_apart = False
            if at_end is not None and step.position == last:
                at_end()
            yield Batch(self._named(step), parts, apart)

    def _named(self, step: StepPlan) -> StepPlan:
        """A step that knows the numbers of its samples where wrappers of the data set choose them."""
        if self._wrapped is None:
            return step
        wrapped, seed = self._wrapped, self._plan.seed
        return replace(step, drawn=lambda places: behind(wrapped, seed, step.epoch, places)[1])

    @property
    def has_workers(self) -> bool:
        """True if worker processes read ahead."""
        return isinstance(self._reading, WorkerReading)

    def begin(self, epoch: int, first: int = 0) -> None:
        """Lets the workers, which must be free, read the beginning of an epoch before it is asked for."""
        if self._share.holder is not None:
            self._keep((epoch, first))

    def _open(self, position: tuple[int, int]) -> tuple[Iterator[_Held], Iterator[Any], bool]:
        ahead, steps = tee(_held(self._planner.steps(*position), self._share))
        requests = _requests(ahead, self._reading.at_a_time, reads_apart=self._reads_apart)
        return steps, self._reading.read(requests), self._reads_apart


class EvaluationLoader(_Prefetching[None, Iterator[Any]]):
    """Reads every sample exactly once, in index order, each rank its share of the micro-batches.

    The random draws of a sample are keyed without the epoch, so every evaluation sees the same samples.

    Args:
        dataset: any map-style data set.
        micro_batch_size: samples of a micro-batch; the last one of the set may be smaller.
        share: which micro-batches of the set are this rank's; there may be none.
        prefetch: micro-batches that each worker may be ahead.
        options: who reads and how, as for ``StepLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        share: Share = _ALL,
        prefetch: int = 2,
        **options: Unpack[ReadingOptions],
    ) -> None:
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size={micro_batch_size} must be at least 1.")
        require_map_style(dataset, "EvaluationLoader")
        self._wrapped, self._seed = dataset, options.get("seed", 0)
        self.samples = len(dataset)
        """Of the set."""
        self.micro_batch_size = micro_batch_size
        self.count = -(-self.samples // micro_batch_size)
        """Micro-batches of the set, over all ranks."""
        self.share, self._held = share, share.of(self.count)
        super().__init__(open_reading(dataset, prefetch=prefetch * options.get("workers", 0), **options))

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches; ``k`` numbers those of the set, and spares from ``count`` on."""
        if not len(self):
            return  # and start no workers
        results = self._take(None)
        for k, indices in self._parts():
            yield MicroBatch(k, indices, next(results))

    def begin(self) -> None:
        """Lets the workers, which must be free, read the first micro-batches before they are asked for."""
        if len(self):
            self._keep(None)

    def sample_numbers(self) -> Indices:
        """The number of each sample in the order in which they are read, which ``Bucketed`` and ``Weighted`` choose."""
        return behind(self._wrapped, self._seed, EVALUATION_EPOCH, np.arange(self.samples))[1]

    def _open(self, position: None) -> Iterator[Any]:
        return self._reading.read(Request(EVALUATION_EPOCH, indices) for _, indices in self._parts())

    def _parts(self) -> Iterator[tuple[int, Indices]]:
        return _in_order(self._held, self.micro_batch_size, self.samples)


def _in_order(numbers: Sequence[int], size: int, samples: int) -> Iterator[tuple[int, Indices]]:
    """The samples of some micro-batches of a set that is read in order; a spare has those of micro-batch 0."""
    for k in numbers:
        first = k * size if k * size < samples else 0
        yield k, np.arange(first, min(first + size, samples), dtype=np.int64)


def _held(steps: Iterator[StepPlan], share: Share) -> Iterator[_Held]:
    numbers, of = share.of(0), 0
    for step in steps:
        if step.leaves != of:
            of = step.leaves
            numbers = share.of(of)
        yield step, [(k, step.indices[k if k < of else 0]) for k in numbers]


def _asks_apart(step: StepPlan, held: list[tuple[int, Indices]], at_a_time: int) -> bool:
    """True for a step of several micro-batches, read by the holder of the first one, and not with steps after it."""
    return step.leaves > 1 and any(k == 0 for k, _ in held) and at_a_time < 2 * len(held)


def _requests(steps: Iterator[_Held], at_a_time: int, *, reads_apart: bool) -> Iterator[Request]:
    """The micro-batches of one holder, in order; after those of a first step it ``reads_apart`` some of its samples.

    Knows no loader, so a forgotten loader is freed at once.
    """
    for step, held in steps:
        parts = [indices for _, indices in held]
        more = max(0, at_a_time // max(1, len(held)) - 1)
        for _, further in islice(steps, more):
            parts += [indices for _, indices in further]
        for first in range(0, len(parts), at_a_time):
            some = parts[first : first + at_a_time]
            indices = some[0] if len(some) == 1 else np.concatenate(some)
            yield Request(step.epoch, indices, tuple(map(len, some)))
        if reads_apart and _asks_apart(step, held, at_a_time):
            yield Request(step.epoch, np.concatenate(step.indices)[:_MOST_APART], is_apart=True)
        reads_apart = False
