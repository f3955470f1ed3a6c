"""When the ranks of a run are sent SIGTERM and SIGKILL: a schedule that only moves closer, and each of them once."""

from __future__ import annotations

import signal
import time


class Ending:
    """The signals that are due, and those that were sent."""

    def __init__(self) -> None:
        self._due: dict[signal.Signals, float] = {}
        self._sent: set[signal.Signals] = set()

    @property
    def is_decided(self) -> bool:
        """Whether the ranks were told to end, or will be."""
        return bool(self._due or self._sent)

    @property
    def next_due(self) -> float:
        """``time.monotonic()`` of the next signal; infinity if there is none."""
        return min(self._due.values(), default=float("inf"))

    def within(self, term: float, kill: float) -> None:
        """Schedules SIGTERM and SIGKILL, in seconds from now; what is due earlier already stays."""
        now = time.monotonic()
        for number, delay in ((signal.SIGTERM, term), (signal.SIGKILL, kill)):
            if number not in self._sent:
                self._due[number] = min(self._due.get(number, float("inf")), now + delay)

    def postpone(self, term: float, kill: float) -> None:
        """Gives the ranks more time: what is due in less than so many seconds from now, is due then."""
        now = time.monotonic()
        for number, more in ((signal.SIGTERM, term), (signal.SIGKILL, kill)):
            if number in self._due:
                self._due[number] = max(self._due[number], now + more)

    def take_due(self) -> list[signal.Signals]:
        """The signals that are to be sent now, SIGTERM first."""
        now = time.monotonic()
        taken = [number for number, due in self._due.items() if due <= now]
        for number in taken:
            del self._due[number]
        self._sent.update(taken)
        return taken
