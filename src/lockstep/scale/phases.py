"""Where the time of a step goes: seconds of each phase, from the moments at which one phase follows another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PHASES = ("data", "copy", "forward", "backward", "compute", "exchange", "optimizer", "other")
"""``data``: waiting for the loader. ``copy``: inputs to the device. ``compute``: forward and backward where they cannot
be told apart, as in replicas on threads. ``exchange``: from this rank's last backward until the gradients are there:
communication that is not hidden, and waiting for slower ranks. ``other``: saving, comparing fingerprints."""

OF_MARKS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "compute": "compute",
    "reduce": "exchange",
    "update": "optimizer",
}
"""The phase that begins when a rank marks its heartbeat so; any other mark begins ``other``."""


class PhaseClock:
    """Adds up the seconds of each phase, step by step. Holds no clock: every call is told the moment.

    Args:
        now: seconds, when the first step begins; it begins by waiting for data.
    """

    def __init__(self, now: float) -> None:
        self.steps: list[dict[str, float]] = []
        """Seconds by phase, of each finished step; phases that did not occur are absent."""
        self._since, self._phase = now, "data"
        self._current: dict[str, float] = {}

    def enter(self, mark: str, now: float) -> None:
        """Ends the phase that was, and begins that of a heartbeat's mark."""
        self._add(self._phase, now - self._since)
        self._since, self._phase = now, OF_MARKS.get(mark, "other")

    def copied(self, seconds: float) -> None:
        """Says that ``seconds`` of the present phase went into copying inputs to the device."""
        self._add("copy", seconds)
        self._add(self._phase, -seconds)

    def end_step(self, now: float) -> None:
        """Ends a step; until the next mark, what passes is ``other`` of the next step."""
        self.enter("over", now)
        self.steps.append(self._current)
        self._current = {}

    def _add(self, phase: str, seconds: float) -> None:
        self._current[phase] = self._current.get(phase, 0.0) + seconds


def mean_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean seconds of each phase per step, in the order of ``PHASES``; phases that never occur are left out."""
    found = {phase: sum(step.get(phase, 0.0) for step in steps) / len(steps) for phase in PHASES}
    return {phase: seconds for phase, seconds in found.items() if seconds > 0.0}


def work(phases: Mapping[str, float]) -> float:
    """Seconds per step that a rank is busy by itself: all but ``exchange``, in which ranks wait for each other."""
    return sum(seconds for phase, seconds in phases.items() if phase != "exchange")


def slowest_rank(ranks: Sequence[Mapping[str, float]]) -> int:
    """The rank for which the others wait: the one with the most work; the first of several."""
    return max(range(len(ranks)), key=lambda rank: (work(ranks[rank]), -rank))


def exchange_and_waiting(ranks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Splits the mean ``exchange`` of a step into (communication, waiting for the slowest rank), in seconds.

    Nobody waits for the rank that comes last, so the shortest exchange of a rank is communication alone.
    """
    each = [phases.get("exchange", 0.0) for phases in ranks]
    return min(each), sum(each) / len(each) - min(each)
