"""Finds the rank whose own work takes longer than the others', which all have to wait for it in every step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from lockstep.launch.heartbeat import Beat, read_beat

STEPS = 20
SECONDS = 5.0
"""A window is at least so many steps and seconds long."""
_TIMES = 1.5
"""How many times as long as the median of the others a rank works before it is called slow."""
_NOTEWORTHY = 0.001
"""Seconds by which it must be longer: below, the difference is noise of the clock and of other programs."""
_WINDOWS = 2
"""In how many windows in a row."""


class SlowRanks:
    """Compares the work of the ranks of one host, window by window; each rank is spoken of once.

    Args:
        directory: the run directory, with the heartbeats.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin: dict[int, Beat] = {}
        self._row: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self, processes: Mapping[int, int]) -> str:
        """The lines to be said of ranks that have turned out to be slow; usually none.

        Args:
            processes: process id of each rank that has not ended.
        """
        beats = {rank: beat for rank in processes if (beat := read_beat(self._directory, rank)) is not None}
        if self._begin.keys() != beats.keys():
            self._begin, self._row = dict(beats), {}
        if len(beats) < 2 or not all(_is_over(self._begin[rank], beat) for rank, beat in beats.items()):
            return ""
        work = {rank: _work(self._begin[rank], beat) for rank, beat in beats.items()}
        self._begin = beats
        return "".join(self._judge(rank, work) for rank in sorted(work))

    def _judge(self, rank: int, work: Mapping[int, float]) -> str:
        others = [seconds for other, seconds in work.items() if other != rank and seconds > 0]
        usual = statistics.median(others) if others else 0.0
        is_slow = usual > 0 and work[rank] > max(_TIMES * usual, usual + _NOTEWORTHY)
        self._row[rank] = self._row.get(rank, 0) + 1 if is_slow else 0
        if self._row[rank] < _WINDOWS or rank in self._told:
            return ""
        self._told.add(rank)
        return (
            f"lockstep: rank {rank} is slow: it works {1e3 * work[rank]:.1f} ms on a micro-batch, data included, the "
            f"others {1e3 * usual:.1f} ms (median), and they wait for it in every step. Look at its device, its cores "
            "and where its data lies.\n"
        )


def _is_over(begin: Beat, beat: Beat) -> bool:
    return beat.step - max(0, begin.step) >= STEPS and beat.time - begin.time >= SECONDS


def _work(begin: Beat, beat: Beat) -> float:
    """Seconds on a micro-batch, the mean over the steps of a window."""
    return (beat.work - begin.work) / (beat.step - max(0, begin.step))
