"""The state of a run by name: nothing in it says how many processes wrote it, or how they were laid out.

torch keys optimizer state by position, so it fits one order of parameters and one process layout. Here the momentum of
``layer1.0.weight`` is the tensor ``layer1.0.weight|momentum_buffer``, whoever holds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lockstep.checkpoint.record import JSON, decode, encode
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.models.weights import compare
from lockstep.text import shorten

ATTRIBUTE = "attribute|"
"""Begins the names of tensors that modules keep in attributes, among those of optimizers."""
Placed = dict[int, Tensor | None]
"""By the id of a stored tensor that has several names the one in its place; None: not made yet."""


@dataclass(frozen=True)
class CheckpointState:
    """Everything a run needs to continue, on any number of processes."""

    model: dict[str, Tensor]
    """Parameters and buffers by name in the unwrapped model; a tied tensor once, under its first name."""
    optimizer: dict[str, Tensor]
    """State tensors of the optimizers, as ``"<optimizer>|<parameter name>|<state key>"``."""
    progress: dict[str, Any]
    """Epoch, step, best metric, scaler, fingerprint, ...: numbers, strings, None, lists, tuples, dicts."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with the name under which ``model`` holds it."""
    optimizer_records: dict[str, Any] = field(default_factory=dict)
    """The JSON part of ``optimizer_state`` for each optimizer."""

    @property
    def compared(self) -> dict[str, Tensor]:
        """``optimizer`` without attributes of modules: what a forward pass leaves there is of one process's samples."""
        return {name: each for name, each in self.optimizer.items() if not name.startswith(ATTRIBUTE)}

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(tensor.nbytes for part in (self.model, self.optimizer) for tensor in part.values())


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The name of every parameter, a tied one under its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of ``model.state_dict(keep_vars=True)``, without extra state."""
    found = model.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX}


def has_extra_state(module: nn.Module) -> bool:
    """True for a module with extra state of its own, submodules aside."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def encoded_extra_states(modules: Mapping[str, nn.Module], tensors: dict[str, Tensor]) -> dict[str, JSON]:
    """The extra state of each of the modules that has its own, by name, as JSON; tensors go into ``tensors``.

    ``ConfigError`` for what a checkpoint cannot hold.
    """
    return {
        name: encode(module.get_extra_state(), f"extra state of {name or 'the model'}", tensors, ordered=True)
        for name, module in modules.items()
        if has_extra_state(module)
    }


def load_extra_states(
    modules: Mapping[str, nn.Module], encoded: Mapping[str, JSON], tensors: Mapping[str, Tensor]
) -> None:
    """Gives each module its extra state; ``CheckpointMismatch`` where one of a checkpoint has no module here."""
    for name, value in encoded.items():
        module = modules.get(name)
        if module is None or type(module).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointMismatch(
                f"The checkpoint holds extra state of the module {name!r}, which has no set_extra_state here. Resume "
                "with the model that wrote it."
            )
        module.set_extra_state(decode(value, tensors))


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers of an unwrapped model by name, and the further names of tied ones.

    The tensors are the model's own, not copies.
    """
    tensors = tensor_state(model)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state {name!r} is a {type(value).__name__}; a checkpoint holds tensors only. "
                "Register it as a buffer, or leave it out of state_dict()."
            )
    aliases = further_names(tensors)
    return {name: value.detach() for name, value in tensors.items() if name not in aliases}, aliases


def further_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tensors that have an earlier name as well, each with the first one."""
    first: dict[tuple[Any, ...], str] = {}
    names = {name: first.setdefault(_identity(tensor), name) for name, tensor in tensors.items()}
    return {name: original for name, original in names.items() if name != original}


def require_same_model(
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    wanted: Mapping[str, Tensor],
    wanted_aliases: Mapping[str, str],
) -> None:
    """Raises ``CheckpointMismatch`` that lists every name that is missing, unexpected, or of another shape, dtype, tie.

    Compares what a checkpoint holds with what is ``wanted`` for the model; values do not matter.
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


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Copies state into a model, in place; layouts, devices and ties of the model stay.

    ``CheckpointMismatch`` lists every name that is missing, unexpected, or of another shape, dtype, tie;
    nothing has been copied then.
    """
    require_same_model(tensors, aliases, *model_state(model))
    copy_values(model, _with_aliases(tensors, aliases))


def copy_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies values into the model's own tensors, whose names were compared."""
    given = OrderedDict(tensors)
    # Without the version metadata, torch would take every module's state for one of its oldest format.
    given._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]  # torch's
    model.load_state_dict(given, strict=False)  # extra state has a place of its own


def _with_aliases(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under all their names."""
    return {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor, and for nothing else."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how a step is computed, not what: they stay those of the running optimizer."""


def optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, with_wrapped: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Takes the state of a torch optimizer as named tensors and a JSON record.

    Args:
        optimizer: any whose state is made of tensors, numbers, strings, and lists or dicts of them.
        names: the name of every parameter it holds.
        with_wrapped: takes the states of the optimizers that it wraps, too.

    Returns:
        Tensors as ``"<parameter name>|<state key>"`` (the optimizer's own, not copies), and the record:
        class, hyperparameters per group, which parameters have state at all, what state has names of its own, the
        strides of tensors that do not lie in memory as it is usual, and which of the names stand for one tensor.
    """
    tensors: dict[str, Tensor] = {}
    groups: list[Any] = []
    states: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        members = [_name(parameter, names) for parameter in group["params"]]
        hyperparameters = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"parameters": list(members), "hyperparameters": encode(hyperparameters, f"|{number}", tensors)})
        for name, parameter in zip(members, group["params"], strict=True):
            if parameter in optimizer.state:
                states[name] = {
                    key: encode(value, f"{name}|{key}", tensors) for key, value in optimizer.state[parameter].items()
                }
    record: dict[str, Any] = {"class": _class_name(optimizer), "groups": groups, "state": states}
    if others := named_state(optimizer):
        record["others"] = encode(others, "|state", tensors, ordered=True)
    usual = {name: parameter for parameter, name in names.items()}
    strides = {key: _strides(each, usual.get(key.partition("|")[0])) for key, each in tensors.items()}
    record["strides"] = {key: value for key, value in strides.items() if value}
    for attribute, inner in wrapped_optimizers(optimizer).items() if with_wrapped else ():
        own, of_inner = optimizer_state(inner, names)
        record.setdefault("wrapped", {})[attribute] = of_inner
        for key, tensor in own.items():
            name, _, rest = key.partition("|")
            tensors[f"{name}|{attribute}.{rest}"] = tensor
    first = {_identity(parameter): name for parameter, name in names.items()}
    firsts = {key: first.setdefault(_identity(tensor), key) for key, tensor in tensors.items()}
    record["same"] = {key: name for key, name in firsts.items() if key != name}
    return tensors, record


def wrapped_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers in the attributes of another, as Lookahead has one, by name; not those whose state is its own."""
    held = {key: each for key, each in vars(optimizer).items() if isinstance(each, Optimizer)}
    return {key: each for key, each in held.items() if each.state is not optimizer.state}


def named_state(optimizer: Optimizer) -> dict[str | int, Any]:
    """The entries of an optimizer's state that have a name or a number instead of a parameter, as a count of steps.

    Containers of tensors are left out: what each process holds of the parameters would have other lengths.
    """
    entries: Mapping[Any, Any] = optimizer.state
    named = {key: value for key, value in entries.items() if isinstance(key, str | int)}
    return {key: value for key, value in named.items() if isinstance(value, Tensor) or _is_storable(value)}


def _is_storable(value: Any) -> bool:
    with suppress(ConfigError):
        encode(value, "")
        return True
    return False


def _strides(tensor: Tensor, parameter: Tensor | None) -> list[int]:
    """Those that ``_placed`` would not choose, as an eigenvector matrix has: bits of its products depend on them."""
    form = tensor.shape, tensor.stride()
    is_usual = parameter is not None and (parameter.shape, parameter.stride()) == form
    if is_usual or tensor.is_contiguous() or torch.empty_like(tensor).stride() != tensor.stride():
        return []
    return list(tensor.stride())


def with_strides(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """The tensor with these strides; as it is without, or where it is another part than the one that had them."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides or ()))
    fits = strides is not None and len(strides) == tensor.dim() and last + 1 == tensor.numel()
    if strides is None or not fits or tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def load_optimizer_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    members: Sequence[Sequence[str]] | None = None,
    placed: Placed | None = None,
) -> None:
    """Gives named state to a torch optimizer, whose groups and parameter order may differ from the writer's.

    Args:
        optimizer: takes the state.
        names: the name of every parameter it holds.
        tensors: from ``optimizer_state``, in the shapes that are held here.
        record: from ``optimizer_state``.
        members: the names of each group's parameters in the whole model, where this process holds only some of them.
        placed: of the optimizer that wraps this one, with which it may share tensors.

    Every bit, dtype and stride is kept; a state tensor takes its parameter's device.
    A parameter without state stays without. ``CheckpointMismatch`` where class, parameters or groups differ.
    """
    if record["class"] != _class_name(optimizer):
        raise CheckpointMismatch(
            f"The checkpoint holds state of {record['class']}, and this run uses {_class_name(optimizer)}. "
            "Resume with the optimizer that wrote it, or start anew from the weights alone."
        )
    strides = record.get("strides", {})
    laid = {key: with_strides(each, strides.get(key)) for key, each in tensors.items()}
    found, own = _joined(laid, record.get("same", {}), {name: p.detach() for p, name in names.items()})
    placed = own if placed is None else placed
    placed.update({key: each for key, each in own.items() if key not in placed})
    hyperparameters = _hyperparameters_by_name(record, found)
    groups = [[_name(p, names) for p in group["params"]] for group in optimizer.param_groups]
    whole = groups if members is None else [list(group) for group in members]
    _require_equal_names(hyperparameters, {name for group in whole for name in group})
    chosen = [_common_hyperparameters(group, hyperparameters, placed) for group in whole]
    for attribute, inner in wrapped_optimizers(optimizer).items() if "wrapped" in record else ():
        if members is not None:
            raise CheckpointMismatch(
                f"The checkpoint holds the state of the {type(inner).__name__} in {_class_name(optimizer)}, which is "
                "not shared out over the processes. Resume under strategy 'ddp', 'dp' or 'single'."
            )
        mark = f"|{attribute}."
        of_inner = {key.replace(mark, "|", 1): each for key, each in found.items() if mark in key}
        load_optimizer_state(inner, names, of_inner, record["wrapped"][attribute], placed=placed)
    optimizer.state.clear()
    for key, value in decode(record.get("others", {}), found).items():
        optimizer.state[key] = _copied(value, placed)
    for group, held, values in zip(optimizer.param_groups, groups, chosen, strict=True):
        group.update({key: value for key, value in values.items() if key not in _IMPLEMENTATION})
        for name, parameter in zip(held, group["params"], strict=True):
            if name in record["state"]:
                stored = decode(record["state"][name], found)
                optimizer.state[parameter] = {
                    key: _placed(value, parameter, key, group, placed) for key, value in stored.items()
                }


def _joined(
    tensors: Mapping[str, Tensor], same: Mapping[str, str], parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Placed]:
    """The tensors, one for all names of the ``same``; those of parameters are placed."""
    first: dict[str, Tensor] = {}
    joined = {key: first.setdefault(same.get(key, key), tensor) for key, tensor in tensors.items()}
    shared = {name: first[name] for name in same.values() if name in first}
    return joined, {id(tensor): parameters.get(name) for name, tensor in shared.items()}


def _copied(value: Any, placed: Placed, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """A value, or a copy where it is a tensor: the same one under all names of the ``placed``."""
    if not isinstance(value, Tensor):
        return value
    if (made := placed.get(id(value))) is None:
        made = copy(value)
        placed.update({id(value): made} if id(value) in placed else {})
    return made


def _placed(value: Any, parameter: Tensor, key: str, group: Mapping[str, Any], placed: Placed) -> Any:
    """A state value where the optimizer would have put it: beside its parameter, in its memory layout."""
    # torch keeps the step counter on the CPU unless the update itself reads it on the device.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    device = torch.device("cpu") if on_host else parameter.device

    def beside(tensor: Tensor) -> Tensor:
        like = parameter if tensor.shape == parameter.shape and tensor.is_contiguous() else tensor
        return torch.empty_like(like, dtype=tensor.dtype, device=device, requires_grad=False).copy_(tensor)

    return tree_map(lambda each: _copied(each, placed, beside), value)


def _hyperparameters_by_name(
    record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[JSON, dict[str, Any]]]:
    found: dict[str, tuple[JSON, dict[str, Any]]] = {}
    for group in record["groups"]:
        values = decode(group["hyperparameters"], tensors)
        if not isinstance(values, dict):
            raise CheckpointError("The checkpoint's optimizer record holds a group without hyperparameters.")
        for name in group["parameters"]:
            found[str(name)] = (group["hyperparameters"], values)
    return found


def _require_equal_names(given: Mapping[str, object], wanted: set[str]) -> None:
    missing, unexpected = sorted(wanted - set(given)), sorted(set(given) - wanted)
    if missing or unexpected:
        parts = [("missing", missing), ("unexpected", unexpected)]
        raise CheckpointMismatch(
            "The checkpoint's optimizer state is about other parameters than this run trains:\n"
            + "\n".join(f"  {kind} ({len(found)}): {shorten(found)}" for kind, found in parts if found)
            + "\nResume with the same trainable parameters, or start anew from the weights alone."
        )


def _common_hyperparameters(
    members: list[str], given: Mapping[str, tuple[JSON, dict[str, Any]]], placed: Placed
) -> dict[str, Any]:
    """The hyperparameters of a group; groups may be split or joined as long as no two disagree."""
    if not members:
        return {}
    first = given[members[0]]
    for name in members[1:]:
        if given[name][0] != first[0]:
            raise CheckpointMismatch(
                f"This run puts {members[0]!r} and {name!r} into one parameter group, and the checkpoint "
                "holds other hyperparameters for each. Resume with the parameter groups that wrote it."
            )
    return {key: _copied(value, placed) for key, value in first[1].items()}


def _name(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    name = names.get(parameter)
    if name is None:
        raise ConfigError(
            f"The optimizer holds a parameter of shape {list(parameter.shape)} that the model does not have. "
            "Build the optimizer from the parameters of the model that is trained."
        )
    return name


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
