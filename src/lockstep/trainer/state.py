"""The values of a trainer: its parts, the readings of an epoch, its progress and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.config.strategy_options import Level
from lockstep.run.step import exact
from lockstep.strategies import Strategy, sum_counts


class Meter:
    """Readings since it was last asked; counts right answers where the outputs are class scores."""

    def __init__(self, strategy: Strategy, loss: Callable[..., Any], classifies: bool) -> None:
        self._strategy, self._loss, self._classifies = strategy, exact(loss), classifies
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._answers = 0
        self._samples = 0
        self._since = time.monotonic()

    def observed_loss(self, output: Any, target: Any) -> Any:
        """The loss, while counting right answers on the device."""
        if self._classifies:
            self._right.append((output.detach().argmax(1) == target).sum())
            self._answers += target.numel()
        return self._loss(output, target)

    def add(self, loss: Tensor, samples: int) -> None:
        """Takes the mean loss of a step over its global batch, and the number of its samples."""
        self._losses.append(loss)
        self._samples += samples

    def read(self) -> dict[str, float]:
        """Mean loss per step, accuracy, and samples per second since the last reading. Collective."""
        row = torch.zeros(2, dtype=torch.float64, device=self._strategy.device)
        if self._right:
            row[0], row[1] = torch.stack(self._right).sum(), self._answers
        right, answers = sum_counts(self._strategy, row).tolist()
        now = time.monotonic()
        values = {"loss": float(torch.stack(self._losses).mean())}
        if answers:
            values["accuracy"] = right / answers
        values["samples_per_second"] = self._samples / max(now - self._since, 1e-9)
        self._losses, self._right, self._answers, self._samples, self._since = [], [], 0, 0, now
        return values

    def restart_clock(self) -> None:
        """Leaves out the time since the last reading, which was spent on something else than training."""
        self._since = time.monotonic()


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """True for each sample whose highest score is at its class: shape (n,) from scores (n, classes)."""
    return output.argmax(1) == target


class EpochMeans:
    """Sums of the readings of one epoch.

    Args:
        epoch: which one.
        stored: what ``as_dict`` gave beside the checkpoint that was taken up; that of another epoch is left out.
    """

    def __init__(self, epoch: int, stored: Mapping[str, Any] | None = None) -> None:
        known = stored if stored is not None and stored.get("epoch") == epoch else {}
        self._epoch, self._count = epoch, int(known.get("count", 0))
        self._sums: dict[str, float] = dict(known.get("sums", {}))

    def add(self, reading: Mapping[str, float]) -> None:
        """Takes a reading, which has the same names as the first."""
        self._count += 1
        for name, value in reading.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """The mean of each; empty before the first reading."""
        return {name: total / self._count for name, total in self._sums.items()}

    def as_dict(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        return {"epoch": self._epoch, "count": self._count, "sums": dict(self._sums)}


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """The parts of a training job, ready to be called."""

    model: torch.nn.Module
    optimizer: Optimizer
    scheduler: Any
    loss: Callable[..., Any]
    classifies: bool
    """True where the model's outputs are class scores, so that there is an accuracy."""
    training_set: Sized
    validation_set: Sized | None
    workers: int
    """Loader processes of each rank."""


@dataclass
class Progress:
    """The course of a run; stored in its checkpoints."""

    metric: str
    """The judged metric: ``validation_accuracy`` (higher is better) or ``validation_loss`` (lower is)."""
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

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Continues from what ``as_dict`` gave."""
        for name in asdict(self):
            if name in stored and name != "metric":
                setattr(self, name, stored[name])


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The results of a finished run."""

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
    """The level that the strategy promises of the fingerprint."""
    bytes_per_step: float = 0.0
    """Bytes of gradients that a rank gave to others in a step, on average; of the rank that gave most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Facts of the strategy about the run, by name."""
