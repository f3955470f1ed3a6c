"""Staleness and its bound, and how far the processes of an asynchronous run have come: steps, barriers, the stop.

The clock is that of stale synchronous parallel training:

    steps done      worker 1: 9      worker 2: 7      worker 3: 6        staleness 2
    may continue    no, 9 - 6 > 2    yes              yes

A worker that has done ``c`` steps may begin its next while the slowest living worker has done at least ``c`` minus the
staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013). With a
staleness of 0 all compute on the same values.

Barriers are numbered, and a tracker keeps the number that each process has reached:

    barriers passed here   3      entered here   4      worker 1 reached 4: it waits, or has already passed it
                                                        worker 2 reached 3: it has steps to do before it arrives

A server learns that a barrier is over after some workers do. A worker that has reached the barrier which the server has
entered may therefore push again before the server collects again; a worker that has not still needs answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError


class Clock:
    """The steps that each living worker has pushed.

    Args:
        staleness: steps that a worker may be ahead of the slowest when it begins one.
        step: steps that all have done.
    """

    def __init__(self, workers: Iterable[int], staleness: int, step: int = 0) -> None:
        self._done = dict.fromkeys(workers, step)
        self.staleness = staleness

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that have not been lost, in order."""
        return sorted(self._done)

    @property
    def farthest(self) -> int:
        """The steps of the fastest living worker."""
        return max(self._done.values(), default=0)

    def advance(self, worker: int) -> int:
        """Counts a pushed step of a worker; returns how many steps it is ahead of the slowest."""
        if worker in self._done:
            self._done[worker] += 1
        return self.lead(worker)

    def lose(self, worker: int) -> bool:
        """Removes a worker; returns whether it was among the living."""
        return self._done.pop(worker, None) is not None

    def lead(self, worker: int) -> int:
        """Steps that a worker is ahead of the slowest living one; 0 for a lost worker."""
        return self._done[worker] - min(self._done.values()) if worker in self._done else 0

    def may_go_on(self, worker: int) -> bool:
        """Returns whether a worker may begin its next step now."""
        return self.lead(worker) <= self.staleness


class Staleness:
    """Counts missed updates, over the run and since the last reading."""

    def __init__(self) -> None:
        self._count = self._total = self._recent_count = self._recent_total = 0
        self.most = self._recent_most = self.lead = 0
        """``most``: updates that any gradient missed; ``lead``: steps that a worker was ahead of the slowest."""

    def add(self, missed: Iterable[int]) -> None:
        """Adds the number of updates that each gradient missed."""
        for number in missed:
            self._count, self._recent_count = self._count + 1, self._recent_count + 1
            self._total, self._recent_total = self._total + number, self._recent_total + number
            self.most, self._recent_most = max(self.most, number), max(self._recent_most, number)

    @property
    def mean(self) -> float:
        """Missed updates of a gradient, over the whole run."""
        return self._total / self._count if self._count else 0.0

    def recent(self) -> dict[str, float]:
        """Mean and maximum since the last call, for a logger; empty without gradients."""
        if not self._recent_count:
            return {}
        found = {
            "staleness": self._recent_total / self._recent_count,
            "staleness_max": float(self._recent_most),
        }
        self._recent_count = self._recent_total = self._recent_most = 0
        return found


@dataclass(frozen=True)
class Barrier:
    """The result of a barrier of all living processes."""

    values: list[Any]
    """The value of each rank; None for a rank that has ended."""
    living: list[int]
    """Ranks of the living workers."""
    bodies: dict[int, bytes | bytearray | memoryview] = field(default_factory=dict)
    """Bodies that ranks sent; on the first server only."""


def require_same(rank: int, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where ``label`` or ``number`` of a rank's barrier are not those of this rank's."""
    if (theirs.get("label"), theirs.get("number")) != (mine["label"], mine["number"]):
        raise ConfigError(
            f"Rank {rank} is at barrier {theirs.get('number')} ({theirs.get('label')}) while this rank is at barrier "
            f"{mine['number']} ({mine['label']}). Every rank must make the same calls in the same order."
        )


class BarrierTracker:
    """The last barrier that each process has reached, and those that this server has entered and passed."""

    def __init__(self) -> None:
        self._reached: dict[int, float] = {}
        self.passed = 0
        """Barriers that this server has passed."""
        self.entered = 0
        """Barriers that this server has entered; its shutdown is the last one."""

    def begin(self) -> int:
        """Enters this server's next barrier and returns its number, from 1."""
        self.entered = self.passed + 1
        return self.entered

    def end(self) -> None:
        """Marks the barrier that was entered as passed."""
        self.passed = self.entered

    def arrive(self, rank: int, number: float) -> None:
        """Notes that a process has reached a barrier; infinity where it has finished."""
        self._reached[rank] = number

    def all_wait(self, workers: Iterable[int]) -> bool:
        """Returns whether all of these already wait at this server's next barrier, and so push nothing before it."""
        return all(self._reached.get(worker, 0) > self.passed for worker in workers)

    def is_awaited(self, worker: int) -> bool:
        """Returns whether this server is at a barrier that the worker has not reached."""
        return self._reached.get(worker, 0) < self.entered


@dataclass
class Stop:
    """The step at which all ranks stop, and the reason code; zeros until a stop is requested."""

    at: int = 0
    reason: int = 0

    def adopt(self, content: Mapping[str, Any]) -> None:
        """Takes the stop of a message, unless one is known already."""
        if not self.at:
            self.at, self.reason = int(content["stop_at"]), int(content["stop_reason"])

    def as_content(self) -> dict[str, int]:
        """Fields of a message."""
        return {"stop_at": self.at, "stop_reason": self.reason}

    def reason_after(self, steps: int) -> int:
        """The reason to stop after this many steps; 0 to continue."""
        return self.reason if self.at and steps >= self.at else 0
