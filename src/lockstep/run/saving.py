"""Writes a run's whole state as a checkpoint, and takes it up again on any number of processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.errors import CheckpointMismatch
from lockstep.fingerprint import Context
from lockstep.precision import Precision
from lockstep.run.position import Position

logger = logging.getLogger(__name__)


@dataclass
class Saved:
    """All that a checkpoint of a run covers."""

    model: nn.Module
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any]
    precision: Precision
    position: Position
    context: Context
    extra: dict[str, Any] = field(default_factory=dict)
    """What the user, or the trainer, stores beside it; must survive JSON."""

    def capture(self, fingerprint: str) -> CheckpointState:
        """The state as it stands; shares memory with the run."""
        scaler = self.precision.scaler
        return checkpoint.capture(
            self.model,
            self.optimizers,
            {
                "position": self.position.as_dict(),
                "fingerprint": fingerprint,
                "context": self.context.as_dict(),
                "scaler": scaler.state_dict() if scaler is not None else {},
                "schedulers": {name: _plain(each.state_dict()) for name, each in self.schedulers.items()},
                "extra": self.extra,
            },
        )

    def restore(self, state: CheckpointState, force_context: bool) -> str:
        """Takes up a state; returns the fingerprint it was written with.

        Raises:
            CheckpointMismatch: it is of another model, recipe or software.
        """
        written = state.progress
        differences = self.context.differences(written["context"])
        if differences and not force_context:
            raise CheckpointMismatch(
                "The checkpoint was written under other conditions, so the bits would not continue:\n  "
                + "\n  ".join(differences)
                + "\nRestore these, or go on at level B with force_context=True (--force-context)."
            )
        checkpoint.restore(state, self.model, self.optimizers)
        if self.precision.scaler is not None and written["scaler"]:
            self.precision.scaler.load_state_dict(written["scaler"])
        for name, scheduler in self.schedulers.items():
            if name in written["schedulers"]:
                scheduler.load_state_dict(_like(scheduler.state_dict(), written["schedulers"][name]))
        for key, value in written["position"].items():
            setattr(self.position, key, value)
        self.extra = dict(written["extra"])
        return str(written["fingerprint"])


def find(resume: str, directory: Path | str | None) -> tuple[Path, CheckpointState] | None:
    """The checkpoint that ``resume`` names ("auto": the newest sound one of the run folder, if any)."""
    if resume == "auto":
        newest = checkpoint.read_newest(Path(directory)) if directory is not None else None
        return (newest.path, newest.state) if newest is not None else None
    return Path(resume), checkpoint.read(resume)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without functions, which the user's code makes again."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Counter):
            kept[key] = {str(name): count for name, count in value.items()}
        elif not callable(value) and not key.startswith("lr_lambdas"):
            kept[key] = value
    return kept


def _like(own: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored state in the types of the scheduler's own."""
    merged = dict(own)
    for key, value in stored.items():
        merged[key] = Counter({int(k): v for k, v in value.items()}) if isinstance(own.get(key), Counter) else value
    return merged
