"""Where a run stands: the next step, and what it needs to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import CheckpointError


@dataclass
class Position:
    """The place in the run. A checkpoint holds it whole; there is no other iterator state."""

    epoch: int = 0
    """The epoch that is trained, or will be next."""
    done: int = 0
    """Steps of that epoch that are done."""
    step: int = 0
    """Optimizer steps done since the run began."""
    inside: bool = False
    """Whether the epoch's batches are being read; if so, the code after them has not run yet."""

    samples: int = 0
    """Size of the data set that the epoch reads; 0 before the first."""

    def take_up(self, stored: Mapping[str, Any]) -> None:
        """Moves to a stored place; ``CheckpointError`` where it is none."""
        here = self.as_dict()
        sound = stored.keys() == here.keys() and all(
            type(stored[name]) is type(own) and stored[name] >= 0 for name, own in here.items()
        )
        if not sound:
            raise CheckpointError(
                f"The checkpoint states no place in a run: {dict(stored)}. Use another one."
            )
        for name, value in stored.items():
            setattr(self, name, value)

    def as_dict(self) -> dict[str, int | bool]:
        """The entries, ready for JSON."""
        return asdict(self)
