"""Writes a run's whole state as a checkpoint, and takes it up again on any number of processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.fingerprint import Context
from lockstep.precision import Precision
from lockstep.run.options import RunOptions
from lockstep.run.parts import Parts
from lockstep.run.position import Position

logger = logging.getLogger(__name__)


@dataclass
class Saved:
    """All that a checkpoint of a run covers."""

    parts: Parts
    precision: Precision
    position: Position
    context: Context
    extra: dict[str, Any] = field(default_factory=dict)
    """What the user, or the trainer, stores beside it; must survive JSON."""

    def capture(self, fingerprint: str) -> CheckpointState:
        """The state as it stands; shares memory with the run."""
        scaler = self.precision.scaler
        state = checkpoint.capture(
            self.parts.model,
            _numbered(self.parts.optimizers),
            {
                "position": self.position.as_dict(),
                "fingerprint": fingerprint,
                "context": self.context.as_dict(),
                "scaler": scaler.state_dict() if scaler is not None else {},
                "schedulers": [_plain(each.state_dict()) for each in self.parts.schedulers],
                "modules": len(self.parts.modules),
                "extra": self.extra,
            },
        )
        for number, module in enumerate(self.parts.modules):
            tensors, _ = checkpoint.model_state(module)
            state.optimizer.update({f"module{number}|{name}": tensor for name, tensor in tensors.items()})
        return state

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
        self._require_equal_counts(written)
        checkpoint.restore(state, self.parts.model, _numbered(self.parts.optimizers))
        for number, module in enumerate(self.parts.modules):
            prefix = f"module{number}|"
            own = {
                key.removeprefix(prefix): t for key, t in state.optimizer.items() if key.startswith(prefix)
            }
            checkpoint.load_model_state(module, own, checkpoint.model_state(module)[1])
        if self.precision.scaler is not None and written["scaler"]:
            self.precision.scaler.load_state_dict(written["scaler"])
        for scheduler, stored in zip(self.parts.schedulers, written["schedulers"]):
            scheduler.load_state_dict(_like(scheduler.state_dict(), stored))
        for key, value in written["position"].items():
            setattr(self.position, key, value)
        self.extra = dict(written["extra"])
        return str(written["fingerprint"])

    def require_accumulable(self, pending: bool) -> None:
        """Raises ``ConfigError`` where a backward pass could not use the loss scale rightly."""
        if self.precision.scaler is None:
            return
        if not self.parts.optimizers:
            raise ConfigError(
                "precision fp16 needs the optimizer: model, optimizer = run.prepare(model, optimizer)."
            )
        if pending:
            raise ConfigError(
                "With precision fp16 a second run.backward before optimizer.step() would add gradients of two loss "
                "scales. To accumulate, give lockstep.init a larger global_batch and more micro_batches; to add "
                "losses, add them in one loss function; or use bf16 or fp32."
            )

    def _require_equal_counts(self, written: Mapping[str, Any]) -> None:
        for kind, stored, here in (
            ("schedulers", len(written["schedulers"]), len(self.parts.schedulers)),
            ("further modules", written["modules"], len(self.parts.modules)),
        ):
            if stored != here:
                raise CheckpointMismatch(
                    f"The checkpoint holds {stored} {kind}, and run.prepare was given {here}. Give the same ones."
                )


def take_up(saved: Saved, options: RunOptions, fingerprint: Callable[[], str]) -> bool:
    """Resumes as the options say; whether there was something to resume.

    Args:
        saved: the run.
        options: what to resume, and under which conditions.
        fingerprint: gives the run's.
    """
    found = find(options.resume, options.directory)
    if found is None:
        return False
    path, state = found
    written, position = saved.restore(state, options.force_context), saved.position
    if not position.inside and position.done:
        position.epoch, position.done = position.epoch + 1, 0
    if fingerprint() != written:
        raise CheckpointError(f"{path} loaded, but its parameters do not have the fingerprint it states.")
    logger.info("Resumed from %s: epoch %d, step %d.", path, position.epoch + 1, position.step)
    return True


def find(resume: str, directory: Path | str | None) -> tuple[Path, CheckpointState] | None:
    """The checkpoint that ``resume`` names ("auto": the newest sound one of the run folder, if any)."""
    if resume == "auto":
        newest = checkpoint.read_newest(Path(directory)) if directory is not None else None
        return (newest.path, newest.state) if newest is not None else None
    return Path(resume), checkpoint.read(resume)


def _numbered(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    return {str(number): each for number, each in enumerate(optimizers)}


def _plain(state: Any) -> Any:
    """A scheduler's state, and those inside of it, without functions, which the user's code makes again."""
    if isinstance(state, Counter):
        return {str(name): count for name, count in state.items()}
    if isinstance(state, list):
        return [_plain(each) for each in state]
    if not isinstance(state, dict):
        return state
    kept = {key: value for key, value in state.items() if not callable(value) and key != "lr_lambdas"}
    return {key: _plain(value) for key, value in kept.items()}


def _like(own: Any, stored: Any) -> Any:
    """The stored state in the types of the scheduler's own."""
    if isinstance(own, Counter):
        return Counter({int(name): count for name, count in stored.items()})
    if isinstance(own, list) and isinstance(stored, list) and len(own) == len(stored):
        return [_like(mine, theirs) for mine, theirs in zip(own, stored)]
    if isinstance(own, dict) and isinstance(stored, dict):
        return {**own, **{key: _like(own.get(key), value) for key, value in stored.items()}}
    return stored
