"""Finds out that a run waits for ranks that have left, or that are leaving while others still train."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lockstep.launch.beat import Beat, Membership
from lockstep.launch.stalls import ask_all
from lockstep.launch.verdict import RankEnd

_COMPANY = 2.0
_STUCK, _STUCK_KILL = 2.0, 1.0
_FORCE = 3.0
_TRAINING = ("forward", "backward", "reduce", "update", "wait")


class Leavers:
    """Looks at the ranks of one host again and again.

    Args:
        directory: the run directory, where ranks answer.
        limit: seconds for which ranks may wait to leave while others train on their own; 0: without limit.
    """

    def __init__(self, directory: Path, limit: float) -> None:
        self._directory, self._limit = directory, limit
        self._leaving_since = self._look_again = time.monotonic()

    def look(
        self, ends: Iterable[RankEnd], running: Mapping[int, int], beats: Sequence[Beat], *, elsewhere: bool
    ) -> tuple[float, float] | None:
        """In how many seconds the ranks are to be sent SIGTERM and SIGKILL; None where nobody waits in vain.

        Args:
            ends: of the ranks that have ended.
            running: process id of each rank that has not.
            beats: the last heartbeats of those.
            elsewhere: whether ranks of other hosts are leaving.
        """
        now = time.monotonic()
        if any(end.left_company and end.was_in_group and now - end.time > _COMPANY for end in ends):
            return 0.0, _FORCE
        if not elsewhere and not any(beat.membership is Membership.LEAVING for beat in beats):
            self._leaving_since, self._look_again = now, now + _STUCK
        elif now > self._look_again and any(_is_stuck(beat, now) for beat in beats):
            self._look_again = now + _STUCK
            if self._is_awaited(running) or 0 < self._limit < now - self._leaving_since:
                return 0.0, _STUCK_KILL
        return None

    def _is_awaited(self, running: Mapping[int, int]) -> bool:
        """Whether a rank that still trains waits for those that leave; it may also be at work on its own."""
        sights = ask_all(self._directory, running, {})
        return any(sight.waits_in and sight.beat.membership is Membership.JOINED for sight in sights)


def _is_stuck(beat: Beat, now: float) -> bool:
    return beat.membership is Membership.JOINED and beat.phase in _TRAINING and now - beat.time > _STUCK
