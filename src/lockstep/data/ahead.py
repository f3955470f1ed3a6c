"""Keeps a reading that was begun before it was asked for, until it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.data.inline import Reading

Place = TypeVar("Place")
Opened = TypeVar("Opened")


class Begun(Generic[Place, Opened]):
    """At most one reading that nobody has asked for yet.

    Args:
        reading: what reads.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._kept: tuple[Place, Opened] | None = None

    def keep(self, place: Place, begin: Callable[[], Opened]) -> None:
        """Begins to read at a place, unless that has begun already."""
        if self._kept is None or self._kept[0] != place:
            self._kept = place, begin()

    def take(self, place: Place) -> Opened | None:
        """What was begun at this place; None where nothing was, or a worker has died since and it must begin again."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == place and self._reading.sound else None

    def forget(self) -> None:
        """Lets go of what was begun."""
        self._kept = None
