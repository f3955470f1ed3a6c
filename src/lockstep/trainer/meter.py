"""Collects loss and accuracy while training, and reads them from the device only when they are shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.run.loss import exact
from lockstep.strategies import Strategy


class Meter:
    """Readings since it was last asked.

    Args:
        strategy: over whose processes the counts are added.
        loss: the loss function; ``observed_loss`` is the same, and counts right answers beside it.
        classifies: whether the outputs are class scores, so that there are right answers.
    """

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
        right, answers = self._strategy.tally(row).tolist()
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
    """Which samples' highest score is at their class: shape (n,) of booleans from scores (n, classes)."""
    return output.argmax(1) == target
