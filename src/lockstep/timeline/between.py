"""Stands between objects and their methods for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Between:
    """What was put before methods of single objects, and how it goes away again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def stand(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Puts ``make(method)`` in the place of a method of one object."""
        replaced = make(getattr(owner, name))
        before = vars(owner).get(name)
        setattr(owner, name, replaced)

        def undo() -> None:
            if vars(owner).get(name) is not replaced:
                return  # someone stands before us now, and calls what we put there: it must go on passing calls on
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def leave(self) -> None:
        """Takes away all that nobody else stands before."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
