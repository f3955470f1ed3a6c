"""Who may go on: stale synchronous parallel, a pure state of counted steps.

    steps done      worker 1: 9      worker 2: 7      worker 3: 6        staleness 2
    may go on       no, 9 - 6 > 2    yes              yes

A worker that has done ``c`` steps may begin its next while the slowest living worker has done at least ``c`` minus the
staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013). With a
staleness of 0 all compute on the same values.
"""

from __future__ import annotations

from collections.abc import Iterable


class Clock:
    """The steps that each living worker has pushed.

    Args:
        workers: their ranks.
        staleness: how many steps a worker may be ahead of the slowest when it begins one.
        step: steps that all have done.
    """

    def __init__(self, workers: Iterable[int], staleness: int, step: int = 0) -> None:
        self._done = dict.fromkeys(workers, step)
        self._staleness = staleness

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that have not been lost, in order."""
        return sorted(self._done)

    @property
    def farthest(self) -> int:
        """The steps of the fastest living worker."""
        return max(self._done.values(), default=0)

    def advance(self, worker: int) -> int:
        """A worker has pushed a step; returns how many steps it is ahead of the slowest."""
        if worker in self._done:
            self._done[worker] += 1
        return self.lead(worker)

    def lose(self, worker: int) -> bool:
        """A worker has gone, and nobody waits for it any more; whether it was among the living."""
        return self._done.pop(worker, None) is not None

    def lead(self, worker: int) -> int:
        """How many steps a worker is ahead of the slowest living one; 0 for one that was lost."""
        return self._done[worker] - min(self._done.values()) if worker in self._done else 0

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may begin its next step now."""
        return self.lead(worker) <= self._staleness
