"""Notices that ranks have fallen silent, asks all of them where they stand, and says what came of it.

A rank that writes heartbeats is asked only when it has been silent for longer than its own steps let expect. A script
that writes none is asked every now and then: it stands still where line and collectives stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.launch.beat import Beat, Membership, read_beat
from lockstep.launch.stalls.pace import Pace
from lockstep.launch.stalls.probe import ask_all
from lockstep.launch.stalls.sight import Sight
from lockstep.launch.stalls.verdict import Kind, StallVerdict, judge_stall

_LOOKS_PER_LIMIT = 4


@dataclass(frozen=True)
class Stall:
    """A run that stands still."""

    verdict: StallVerdict
    sights: tuple[Sight, ...]


class StallWatch:
    """Watches the ranks of one host.

    Args:
        directory: the run directory, with the heartbeats.
        limit: seconds of silence below which nothing is a stall; 0: never ask.
        is_part: whether ranks of other hosts take part in the run, so that only who sees all of them can judge.
    """

    def __init__(self, directory: Path, limit: float, *, is_part: bool = False) -> None:
        self._directory, self._limit, self._is_part = directory, limit, is_part
        self._paces: dict[int, Pace] = {}
        self._places: dict[int, tuple[object, float]] = {}
        self._next_look = 0.0
        self._told: set[tuple[object, ...]] = set()

    def look(self, processes: Mapping[int, int]) -> Stall | None:
        """What is wrong, if the run stands still; cheap as long as every rank gives signs of life.

        Args:
            processes: process id of each rank that has not ended.
        """
        if not self._limit:
            return None
        beats = {rank: beat for rank in processes if (beat := read_beat(self._directory, rank)) is not None}
        if any(beat.membership is Membership.LEAVING for beat in beats.values()):
            return None  # whoever still trains is told to leave too
        for rank, beat in beats.items():
            self._paces.setdefault(rank, Pace(self._limit)).hear(beat)
        now = time.monotonic()
        if now < self._next_look or not any(self._is_due(rank, beat) for rank, beat in beats.items()):
            return None
        self._next_look = now + self._limit / _LOOKS_PER_LIMIT
        sights = [self._without_beats(sight) for sight in ask_all(self._directory, processes, self._paces)]
        if not any(sight.is_overdue for sight in sights):
            return None
        verdict = judge_stall(sights)
        if self._is_part:
            return Stall(verdict or StallVerdict(Kind.BUSY), tuple(sights))
        return (
            Stall(verdict, tuple(sights)) if verdict is not None and self._is_news(verdict, sights) else None
        )

    def _is_due(self, rank: int, beat: Beat) -> bool:
        pace = self._paces[rank]
        return pace.silence(beat) > (self._limit if _writes_no_beats(beat) else pace.limit(beat))

    def _without_beats(self, sight: Sight) -> Sight:
        """Measures the silence of a script without heartbeats by how long it has been seen at the same place."""
        if not _writes_no_beats(sight.beat):
            return sight
        place = sight.stack, sight.collectives[-1:], sight.state
        former, since = self._places.get(sight.rank, (None, 0.0))
        if place != former:
            since = time.monotonic()
            self._places[sight.rank] = place, since
        return replace(sight, silence=time.monotonic() - since, limit=self._limit)

    def _is_news(self, verdict: StallVerdict, sights: list[Sight]) -> bool:
        """A run that may still go on is spoken of once for each place at which it stands.

        Of a script without heartbeats nothing is said then: the same line is no sign of standing still.
        """
        if verdict.kind is not Kind.BUSY:
            return True
        beats = {sight.rank: sight.beat for sight in sights if not _writes_no_beats(sight.beat)}
        place = tuple((rank, beats[rank].place) for rank in verdict.culprits if rank in beats)
        if not place or place in self._told:
            return False
        self._told.add(place)
        return True


def _writes_no_beats(beat: Beat) -> bool:
    return beat.phase == "start" and beat.membership is Membership.OUTSIDE
