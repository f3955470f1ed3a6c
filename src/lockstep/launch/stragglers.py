"""Finds the rank whose own work takes longer than that of the others, which wait for it in every step.

``StepWindows`` reads from heartbeats what each rank of a host did in the last window of steps, which costs the ranks
nothing; ``SlowRanks`` compares them. Over several hosts the supervisor of node 0 compares the windows of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.heartbeat import Beat, read_beats

STEPS = 20
SECONDS = 5.0
"""The minimum length of a window; both must be reached."""


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """Means of one rank over the steps of a window, in seconds."""

    work: float
    """On a micro-batch, data included; 0 for a rank that has none."""
    waited: float
    """In a step: for data of other ranks, without waiting that overlaps with work."""
    step: float
    """Of a whole step, without what lies between steps, such as an evaluation."""


class StepWindows:
    """The successive windows of one host's ranks, from the run directory; all ranks share their begin and end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin: dict[int, Beat] = {}

    def look(self, processes: Mapping[int, int]) -> dict[int, StepWindow]:
        """Returns the window of each of these ranks when it is over; empty before."""
        beats = read_beats(self._directory, processes)
        if self._begin.keys() != beats.keys():
            self._begin = dict(beats)
        for rank, beat in beats.items():
            begin = self._begin[rank]
            if beat.step - max(0, begin.step) < STEPS or beat.time - begin.time < SECONDS:
                return {}
        found = {rank: _between(self._begin[rank], beat) for rank, beat in beats.items()}
        self._begin = beats
        return found


def _between(begin: Beat, end: Beat) -> StepWindow:
    steps = end.step - max(0, begin.step)
    return StepWindow(
        work=(end.work - begin.work) / steps,
        waited=(end.waited - begin.waited) / steps,
        step=(end.stepped - begin.stepped) / steps,
    )


_SLOW_FACTOR, _SLOW_SECONDS = 1.5, 0.001
"""A rank is slow if its work exceeds the median of the others by both, in ``_WINDOWS`` windows in a row."""
_WINDOWS = 2


class SlowRanks:
    """Compares the work of ranks, window by window; each slow rank is reported once."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._reported: set[int] = set()

    def take(self, windows: Mapping[int, StepWindow]) -> str:
        """Takes the windows of all ranks when they are over; returns a line for each that has proved to be slow."""
        if windows.keys() != self._in_a_row.keys() and windows:
            self._in_a_row = dict.fromkeys(windows, 0)
        work = {rank: window.work for rank, window in windows.items()}
        return "".join(self._judge(rank, work) for rank in sorted(work))

    def _judge(self, rank: int, work: Mapping[int, float]) -> str:
        others = [seconds for other, seconds in work.items() if other != rank and seconds > 0]
        usual = statistics.median(others) if others else 0.0
        is_slow = usual > 0 and work[rank] > max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS)
        self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
        if self._in_a_row[rank] < _WINDOWS or rank in self._reported:
            return ""
        self._reported.add(rank)
        return (
            f"lockstep: rank {rank} is slow: it works {1e3 * work[rank]:.1f} ms on a micro-batch, data included, the "
            f"others {1e3 * usual:.1f} ms (median), and they wait for it in every step. Check its device, its cores "
            "and its storage.\n"
        )
