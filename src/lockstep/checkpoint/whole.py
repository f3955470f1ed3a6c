"""Takes the state of a model and its optimizers in one process, and gives it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.encoding import JSON
from lockstep.checkpoint.optimizer import load_optimizer_state, optimizer_state
from lockstep.checkpoint.state import CheckpointState, load_model_state, model_state
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of every parameter, a tied one under its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def capture(
    model: nn.Module, optimizers: Mapping[str, Optimizer], progress: Mapping[str, Any]
) -> CheckpointState:
    """The whole state of a run whose model and optimizers this process holds unsharded.

    Args:
        model: the unwrapped model.
        optimizers: every optimizer by a label of its own, which the reader must use again.
        progress: what else to store.

    Returns:
        A state that shares memory with the model and optimizers: write it before the next step.
    """
    names = parameter_names(model)
    tensors: dict[str, Tensor] = {}
    records: dict[str, JSON] = {}
    for label, optimizer in optimizers.items():
        if "|" in label:
            raise ConfigError(f"The optimizer label {label!r} contains '|'. Use letters and digits.")
        own, records[label] = optimizer_state(optimizer, names)
        tensors.update({f"{label}|{key}": tensor for key, tensor in own.items()})
    model_tensors, aliases = model_state(model)
    return CheckpointState(model_tensors, tensors, {**progress}, aliases, records)


def restore(state: CheckpointState, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Gives a captured or read state to a model and its optimizers, in place; returns the progress.

    ``CheckpointMismatch`` where they are not the ones the state was taken from.
    """
    records = state.optimizer_records
    if set(records) != set(optimizers):
        raise CheckpointMismatch(
            f"The checkpoint holds the optimizers {sorted(records)}, and this run has {sorted(optimizers)}. "
            "Resume with the same ones."
        )
    load_model_state(model, state.model, state.aliases)
    names = parameter_names(model)
    for label, optimizer in optimizers.items():
        prefix = f"{label}|"
        own = {key.removeprefix(prefix): t for key, t in state.optimizer.items() if key.startswith(prefix)}
        load_optimizer_state(optimizer, names, own, _record(records[label]))
    return dict(state.progress)


def _record(value: JSON) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise CheckpointError("The checkpoint's optimizer record is not one. Use another checkpoint.")
    return value
