"""Where records go while ``lockstep verify --script`` runs a script, and when they are enough."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Session:
    """What ``lockstep verify`` wants of a script."""

    folder: Path
    steps: int


class Enough(BaseException):
    """Ends a script after the last step that is wanted; no ``except Exception`` of the script stops it."""


wanted: ContextVar[Session | None] = ContextVar("wanted", default=None)
"""Set by ``lockstep verify --script`` around the script."""
