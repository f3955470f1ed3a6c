"""What each rank of a host has done in the last window of steps, read from heartbeats; it costs the ranks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.beat import Beat, read_beat

STEPS = 20
SECONDS = 5.0
"""A window is at least so many steps and seconds long."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Means of one rank over the steps of a window, in seconds."""

    work: float
    """On a micro-batch, data included; 0 for a rank that has none."""
    waited: float
    """Of a step: for data of other ranks, as far as no work hides it."""
    step: float
    """Of a step in all."""


class Windows:
    """The windows of one host's ranks, one after the other; all ranks share their begin and end.

    Args:
        directory: the run directory, with the heartbeats.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begin: dict[int, Beat] = {}

    def look(self, processes: Mapping[int, int]) -> dict[int, Window]:
        """What each rank did, when a window is over; empty while it lasts.

        Args:
            processes: process id of each rank that has not ended.
        """
        beats = {rank: beat for rank in processes if (beat := read_beat(self._directory, rank)) is not None}
        if self._begin.keys() != beats.keys():
            self._begin = dict(beats)
        if not all(_is_over(self._begin[rank], beat) for rank, beat in beats.items()):
            return {}
        found = {rank: _between(self._begin[rank], beat) for rank, beat in beats.items()}
        self._begin = beats
        return found


def _is_over(begin: Beat, beat: Beat) -> bool:
    return beat.step - max(0, begin.step) >= STEPS and beat.time - begin.time >= SECONDS


def _between(begin: Beat, end: Beat) -> Window:
    steps = end.step - max(0, begin.step)
    return Window(
        work=(end.work - begin.work) / steps,
        waited=(end.waited - begin.waited) / steps,
        step=(end.time - begin.time) / steps,
    )
