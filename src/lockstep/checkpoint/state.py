"""The state of a run by name: nothing in it says how many processes wrote it, or how they were laid out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoint.encoding import JSON
from lockstep.errors import CheckpointMismatch, ConfigError
from lockstep.models.differences import Differences, compare


@dataclass(frozen=True)
class CheckpointState:
    """Everything a run needs to go on, on any number of processes."""

    model: dict[str, Tensor]
    """Parameters and buffers by name in the unwrapped model; a tied tensor once, under its first name."""
    optimizer: dict[str, Tensor]
    """State tensors of the optimizers, as ``"<optimizer>|<parameter name>|<state key>"``."""
    progress: dict[str, Any]
    """Epoch, step, best metric, scaler, fingerprint, ...: numbers, strings, None, lists, tuples, dicts."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with the name under which ``model`` holds it."""
    optimizer_records: dict[str, JSON] = field(default_factory=dict)
    """The JSON part of ``optimizer_state`` for each optimizer."""

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(
            t.numel() * t.element_size() for part in (self.model, self.optimizer) for t in part.values()
        )


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of every parameter, a tied one under its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers of an unwrapped model by name, and the further names of tied ones.

    The tensors are the model's own, not copies.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state {name!r} is a {type(value).__name__}; a checkpoint holds tensors only. "
                "Register it as a buffer, or leave it out of state_dict()."
            )
        original = first_name.setdefault(_identity(value), name)
        if original == name:
            tensors[name] = value.detach()
        else:
            aliases[name] = original
    return tensors, aliases


def require_same_model(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    wanted: Mapping[str, Tensor],
    wanted_aliases: Mapping[str, str],
) -> None:
    """Raises ``CheckpointMismatch`` that lists every name that is missing, unexpected, or of another shape, dtype, tie.

    Args:
        tensors: what a checkpoint holds of a model.
        aliases: its further names of tied tensors.
        wanted: what the model has; values do not matter.
        wanted_aliases: the further names of its tied tensors.
    """
    differences = compare(_with_aliases(tensors, aliases), _with_aliases(wanted, wanted_aliases))
    if differences:
        raise CheckpointMismatch(
            f"The checkpoint holds the state of another model:\n{differences.describe()}\n"
            "Resume with the model that wrote it, or start anew from its weights alone."
        )
    if dict(aliases) != dict(wanted_aliases):
        changed = sorted(set(aliases.items()) ^ set(wanted_aliases.items()))
        raise CheckpointMismatch(
            "The checkpoint ties other parameters together than the model does: "
            + ", ".join(f"{alias} = {name}" for alias, name in changed)
            + ". Resume with the model that wrote it."
        )


def load_model_state(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], *, strict: bool = True
) -> Differences:
    """Copies state into a model, in place; layouts, devices and ties of the model stay.

    ``CheckpointMismatch`` lists every name that is missing, unexpected, or of another shape, dtype, tie;
    nothing has been copied then. With ``strict=False`` what fits is copied and the differences are returned.
    """
    wanted, wanted_aliases = model_state(model)
    given, everything = _with_aliases(tensors, aliases), _with_aliases(wanted, wanted_aliases)
    if strict:
        require_same_model(tensors, aliases, wanted, wanted_aliases)
    differences = compare(given, everything)
    fitting = OrderedDict(
        (name, given[name])
        for name, own in everything.items()
        if name in given and given[name].shape == own.shape and given[name].dtype == own.dtype
    )
    # Without the version metadata, torch would take every module's state for one of its oldest format.
    fitting._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined] # torch's own name
    model.load_state_dict(fitting, strict=False)
    return differences


def _with_aliases(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under all their names."""
    return {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor, and for nothing else."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
