"""What a trainer gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.levels import Level


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run came to."""

    fingerprint: str
    values: dict[str, float]
    """Results of the last evaluation."""
    best: float | None
    best_epoch: int
    metric: str
    samples_per_second: float
    """Over all training steps of this process, evaluation and checkpoints left out."""
    seconds: float
    """Spent on training steps."""
    weights: Path | None
    """The exported weights of the last step."""
    skipped_steps: int
    level: Level = Level.BITWISE
    """What the strategy promises of the fingerprint."""
    bytes_per_step: float = 0.0
    """Bytes of gradients that a rank gave to others in a step, on average; of the rank that gave most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What the strategy says of the run, by name."""
