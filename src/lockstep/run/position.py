"""Where a run stands: the next step, and what it needs to go on from there."""

from __future__ import annotations

from dataclasses import dataclass


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

    def as_dict(self) -> dict[str, int | bool]:
        """The entries, ready for JSON."""
        return {"epoch": self.epoch, "done": self.done, "step": self.step, "inside": self.inside}
