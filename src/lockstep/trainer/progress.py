"""What a trainer remembers beside model and optimizer: its best result, and how long ago that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """The course of a run; stored in its checkpoints."""

    metric: str
    """What is judged: ``validation_accuracy`` (higher is better) or ``validation_loss`` (lower is)."""
    best: float | None = None
    best_epoch: int = -1
    best_step: int = -1
    since_best: int = 0
    """Evaluations since the best one."""

    def judge(self, epoch: int, step: int, values: Mapping[str, float]) -> bool:
        """Takes the results of an epoch that ended with ``step``; returns whether they are the best so far."""
        value = values[self.metric]
        better = self.best is None or (
            value > self.best if self.metric.endswith("accuracy") else value < self.best
        )
        if better:
            self.best, self.best_epoch, self.best_step, self.since_best = value, epoch, step, 0
        else:
            self.since_best += 1
        return better

    def as_dict(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        return asdict(self)

    def take_up(self, stored: Mapping[str, Any]) -> None:
        """Continues from what ``as_dict`` gave."""
        for name in asdict(self):
            if name in stored and name != "metric":
                setattr(self, name, stored[name])
