"""Decides from what is seen of all ranks why a run stands still: a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lockstep.launch.stalls.sight import Collective, Sight


class Kind(Enum):
    """Why a run stands still."""

    STOPPED = "a process is stopped or cannot be interrupted"
    MISSING = "a rank is missing where others wait for it"
    MISMATCH = "ranks wait in different collectives"
    NETWORK = "all ranks wait in the same collective"
    BUSY = "no rank waits for another"


@dataclass(frozen=True)
class StallVerdict:
    """The kind, and the ranks that are to blame; none where all are alike."""

    kind: Kind
    culprits: tuple[int, ...] = ()
    shown: dict[int, Collective] | None = None
    """For a mismatch: the first collective in which ranks differ, by rank."""

    @property
    def is_deadlock(self) -> bool:
        """Whether the run cannot go on by itself as far as can be seen."""
        return self.kind is not Kind.BUSY


def judge_stall(sights: Sequence[Sight]) -> StallVerdict | None:
    """The verdict over ranks of which at least one is overdue; None where whom they wait for still has time."""
    still = [sight for sight in sights if sight.state in ("T", "t", "D") and sight.is_overdue]
    if still:
        return StallVerdict(Kind.STOPPED, tuple(sight.rank for sight in still))
    waiting = [sight for sight in sights if sight.waits_in]
    others = [sight for sight in sights if not sight.waits_in]
    if not waiting:
        return StallVerdict(Kind.BUSY, tuple(sight.rank for sight in others if sight.is_overdue))
    if others:
        late = [sight for sight in others if sight.is_overdue]
        return StallVerdict(Kind.MISSING, tuple(sight.rank for sight in late)) if late else None
    if not all(sight.is_overdue for sight in waiting):
        return None
    return _mismatch(waiting) or StallVerdict(Kind.NETWORK)


def _mismatch(waiting: Sequence[Sight]) -> StallVerdict | None:
    """The first collective at which the ranks' records differ, else another place in the code."""
    recorded = {sight.rank: {each.sequence: each for each in sight.collectives} for sight in waiting}
    shared = sorted(set.intersection(*(set(each) for each in recorded.values()))) if recorded else []
    for sequence in shared:
        at = {rank: each[sequence] for rank, each in recorded.items()}
        odd = _odd_ones({rank: each.signature for rank, each in at.items()})
        if odd:
            return StallVerdict(Kind.MISMATCH, odd, at)
    odd = _odd_ones({sight.rank: (sight.waits_in, sight.frame) for sight in waiting})
    if len(odd) * 2 == len(waiting):  # no majority: those that have come less far hold up the others
        behind = min(sight.beat.step for sight in waiting)
        odd = tuple(sight.rank for sight in waiting if sight.beat.step == behind)
    return StallVerdict(Kind.MISMATCH, odd) if 0 < len(odd) < len(waiting) else None


def _odd_ones(values: dict[int, Any]) -> tuple[int, ...]:
    """The ranks that differ from most; of two equal halves, the one without the lowest rank."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return ()
    lowest = values[min(values)]
    usual = max(counts, key=lambda value: (counts[value], value == lowest))
    return tuple(rank for rank, value in values.items() if value != usual)
