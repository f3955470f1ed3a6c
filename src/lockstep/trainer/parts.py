"""What a trainer is given: what it trains, how long, and how often it saves."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Settings(Protocol):
    """How long and how often; the trainer's part of a job."""

    @property
    def epochs(self) -> int: ...  # noqa: D102  # fields of the job's [training]
    @property
    def clip_norm(self) -> float | None: ...  # noqa: D102
    @property
    def drop_last(self) -> bool: ...  # noqa: D102
    @property
    def evaluate_every(self) -> int: ...  # noqa: D102
    @property
    def early_stop(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """When a trainer saves and reads its meters."""

    save_every_epochs: int = 1
    """Epochs between checkpoints; 0: at the end only."""
    save_every_steps: int = 0
    """Steps between checkpoints, beside those of the epochs; 0: none."""
    log_every: int = 10
    """Steps between readings of loss and accuracy."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is trained, ready to be called."""

    model: torch.nn.Module
    optimizer: Optimizer
    scheduler: Any
    loss: Callable[..., Any]
    classifies: bool
    """Whether the model's outputs are class scores, so that accuracy means something."""
    training_set: Sized
    validation_set: Sized | None
    workers: int
    """Loader processes of each rank."""
