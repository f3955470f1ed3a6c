"""Which meetings are over, and who has come to the next: a pure state of counted meetings.

    meetings held here   3      begun here   4        worker 1 came to 4: it waits, or is already past it
                                                      worker 2 came to 3: it has steps to do before it comes

A server learns last that a meeting is over when the answer to another process is faster than the one to it. Whoever has
come to the meeting that the server has begun, may thus push again before the server collects again; whoever has not,
still needs answers to get there.
"""

from __future__ import annotations

from collections.abc import Iterable


class Attendance:
    """The last meeting that each process has come to, and those that this server has begun and held."""

    def __init__(self) -> None:
        self._came: dict[int, float] = {}
        self.held = 0
        """Meetings that are over for this server."""
        self.begun = 0
        """Meetings that this server has come to; its farewell is the last of them."""

    def begin(self) -> int:
        """This server comes to its next meeting; the number of it, from 1."""
        self.begun = self.held + 1
        return self.begun

    def end(self) -> None:
        """The meeting that was begun is over."""
        self.held = self.begun

    def come(self, rank: int, meeting: float) -> None:
        """A process has come to a meeting; infinity: it has finished."""
        self._came[rank] = meeting

    def all_wait(self, workers: Iterable[int]) -> bool:
        """Whether these push nothing before this server comes to its next meeting, because they are there already."""
        return all(self._came.get(worker, 0) > self.held for worker in workers)

    def is_awaited(self, worker: int) -> bool:
        """Whether this server is at a meeting to which the worker has not come."""
        return self._came.get(worker, 0) < self.begun
