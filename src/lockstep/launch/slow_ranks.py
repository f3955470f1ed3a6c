"""Finds the rank whose own work takes longer than the others', which all have to wait for it in every step.

On one host its supervisor compares the ranks, over several hosts that of node 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lockstep.launch.windows import Window

_TIMES = 1.5
"""How many times as long as the median of the others a rank works before it is called slow."""
_NOTEWORTHY = 0.001
"""Seconds by which it must be longer: below, the difference is noise of the clock and of other programs."""
_WINDOWS = 2
"""In how many windows in a row."""


class SlowRanks:
    """Compares the work of ranks, window by window; each rank is spoken of once."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        self._told: set[int] = set()

    def take(self, windows: Mapping[int, Window]) -> str:
        """The lines to be said of ranks that have turned out to be slow; usually none.

        Args:
            windows: what each rank did in the window that is over; empty while it lasts.
        """
        if windows.keys() != self._row.keys() and windows:
            self._row = dict.fromkeys(windows, 0)
        work = {rank: window.work for rank, window in windows.items()}
        return "".join(self._judge(rank, work) for rank in sorted(work))

    def _judge(self, rank: int, work: Mapping[int, float]) -> str:
        others = [seconds for other, seconds in work.items() if other != rank and seconds > 0]
        usual = statistics.median(others) if others else 0.0
        is_slow = usual > 0 and work[rank] > max(_TIMES * usual, usual + _NOTEWORTHY)
        self._row[rank] = self._row[rank] + 1 if is_slow else 0
        if self._row[rank] < _WINDOWS or rank in self._told:
            return ""
        self._told.add(rank)
        return (
            f"lockstep: rank {rank} is slow: it works {1e3 * work[rank]:.1f} ms on a micro-batch, data included, the "
            f"others {1e3 * usual:.1f} ms (median), and they wait for it in every step. Look at its device, its cores "
            "and where its data lies.\n"
        )
