"""The values that optimizers and modules keep in attributes, beside ``state_dict()``. Checkpoints hold the plain ones:

numbers, texts, lists, tuples, deques and dicts of such, and the states of generators; of modules also small tensors.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.manifest import decode, encode
from lockstep.checkpoint.state import has_extra_state
from lockstep.core.fingerprint import sum_of_bits
from lockstep.data.keyed import encoded_state, set_encoded_state
from lockstep.distributed.collectives import gather_json
from lockstep.strategies import Strategy
from lockstep.strategies.absent import AbsentTensor

_OF_TORCH = (
    *("_opt_called", "_step_count", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_is_full_backward_hook"),
)
"""Attributes by which torch's own optimizers, schedulers and modules know what they do in this process."""
_OF_BASES = frozenset(vars(nn.Module())) | {"defaults", "state", "param_groups"}


def numbers_of(holder: Any) -> dict[str, str]:
    """The numbers among an object's attributes, as texts from which they can be read back.

    Those of a module have its mode, ``training``.
    """
    return {
        name: hex(value) if type(value) is int and value.bit_length() > _MOST_BITS else repr(value)
        for name, value in vars(holder).items()
        if type(value) in (bool, int, float) and name not in _OF_TORCH
    }


def decoded(attributes: Mapping[str, str]) -> dict[str, bool | int | float]:
    """The numbers again."""
    return {name: _number(text) for name, text in attributes.items()}


def _number(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    digits = text.lstrip("-")
    return int(text, 0) if digits.startswith("0x") or digits.isdigit() else float(text)


class Attributes:
    """The values that optimizers and modules keep in attributes, beside what they kept when this was made."""

    def __init__(self, optimizers: Sequence[Optimizer], modules: Mapping[str, nn.Module]) -> None:
        self._optimizers, self._modules = optimizers, modules
        self._first = self._held()

    def changed(self, strategy: Strategy) -> dict[str, Any]:
        """The values that have changed since, as texts by holder and attribute. Collective."""
        mine = [[*place, text] for place, text in self._held().items() if self._first.get(place) != text]
        everyone = [mine]
        if not strategy.replicated and strategy.all_ranks is not None:
            everyone = gather_json(mine, strategy.all_ranks, strategy.device)
        found: dict[str, dict[str, dict[str, str]]] = {}
        # A process that steps no optimizer, as a worker of a parameter server, knows the first numbers only.
        for kind, holder, name, text in itertools.chain(*reversed(everyone)):
            found.setdefault(kind, {}).setdefault(holder, {})[name] = text
        return found

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Sets what ``changed`` gave."""
        for name, holder in self._holders().items():
            vars(holder).update(decoded(stored.get("attributes", {}).get(name, {})))
            set_values(holder, stored.get("values", {}).get(name, {}))
            for key, state in stored.get("generators", {}).get(name, {}).items():
                if key in vars(holder):
                    set_encoded_state(vars(holder)[key], json.loads(state))

    def _holders(self) -> dict[str, Any]:
        """The objects that may keep values as attributes, which no ``state_dict`` has."""
        optimizers = {f"optimizer {number}": each for number, each in enumerate(self._optimizers)}
        return optimizers | {f"module {name}": each for name, each in self._modules.items()}

    def _held(self) -> dict[tuple[str, str, str], str]:
        """The numbers of all, and what else is plain there, as texts by kind, holder and attribute."""
        kinds = {"attributes": numbers_of, "values": values_of, "generators": generators_of}
        return {
            (kind, name, key): text
            for kind, texts_of in kinds.items()
            for name, holder in self._holders().items()
            for key, text in texts_of(holder).items()
        }


def generators_of(holder: Any) -> dict[str, str]:
    """The states of generators of random numbers among an object's attributes, as texts."""
    states = {name: encoded_state(value) for name, value in vars(holder).items()}
    return {name: json.dumps(state) for name, state in states.items() if state is not None}


_MOST_ENTRIES, _MOST_NUMBERS, _MOST_BITS = 1_000, 4_096, 1_000
"""Of a container, of a tensor, and of an int that is written in decimal digits."""


def values_of(holder: Any) -> dict[str, str]:
    """The plain values among the attributes of a module or an optimizer that are no numbers, as texts.

    Of a module also its small tensors that no ``state_dict()`` has: attributes, and buffers with ``persistent=False``.
    """
    found = {
        name: json.dumps(encode(list(value) if type(value) is deque else value, name))
        for name, value in vars(holder).items()
        if type(value) in (str, type(None), list, tuple, dict, deque)
        and name not in _OF_BASES
        and name not in _OF_TORCH
        and _is_plain(value)
    }
    if not isinstance(holder, nn.Module):
        return found
    tensors = {name: value for name, value in vars(holder).items() if _is_small(value)}
    buffers = {name: holder._buffers.get(name) for name in sorted(holder._non_persistent_buffers_set)}
    tensors |= {name: buffer for name, buffer in buffers.items() if _is_small(buffer)}
    return found | {name: json.dumps({_TENSOR: _numbers(tensor)}) for name, tensor in tensors.items()}


def set_values(holder: Any, stored: Mapping[str, str]) -> None:
    """Gives an object what ``values_of`` gave of it; containers and tensors in place: others may refer to them."""
    held = vars(holder)
    for name, text in stored.items():
        value, own = decode(json.loads(text)), held.get(name)
        if isinstance(value, dict) and value.keys() == {_TENSOR}:
            _set_tensor(holder, name, *value[_TENSOR])
        elif type(own) is dict and isinstance(value, dict):
            own.clear()
            own.update(value)
        elif type(own) in (list, deque) and isinstance(value, list):
            own.clear()
            own.extend(value)
        else:
            held[name] = value


def _set_tensor(module: nn.Module, name: str, dtype: str, shape: list[int], numbers: list[Any]) -> None:
    place = module._buffers if name in module._buffers else vars(module)
    own, tensor = place.get(name), torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
    if isinstance(own, AbsentTensor):
        return  # another process has it
    if type(own) is Tensor and own.shape == tensor.shape and own.dtype == tensor.dtype:
        with torch.no_grad():
            own.copy_(tensor)
    else:
        place[name] = tensor.to(own.device if isinstance(own, Tensor) else tensor.device)


_TENSOR = "tensor values"
"""Marks what stands for a tensor."""


def _is_plain(value: Any, depth: int = 4) -> bool:
    """True for numbers, texts, None, and for lists, deques, tuples and dicts of at most 1,000 entries of such."""
    kind = type(value)
    if kind in (list, tuple, dict, deque):
        values = [*value.keys(), *value.values()] if kind is dict else value
        is_small = len(value) <= _MOST_ENTRIES and depth > 0
        return is_small and all(_is_plain(each, depth - 1) for each in values)
    return kind in (bool, int, float, str, type(None))


def _is_small(value: Any) -> bool:
    """True for a tensor of a few real numbers, without a gradient or a graph."""
    if type(value) is not Tensor or value.is_meta or value.layout is not torch.strided:
        return False
    return value.numel() <= _MOST_NUMBERS and not (value.requires_grad or value.is_complex())


def _numbers(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.flatten().tolist()]


def unsaved_tensors(optimizer: Optimizer) -> dict[str, str]:
    """Tensors that an optimizer of the user's own keeps where its ``state_dict()`` has none, by name, as texts.

    Those in its attributes, in optimizers that it wraps, and in entries of ``state`` that belong to no parameter.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    saved = {id(state) for parameter, state in optimizer.state.items() if id(parameter) in members}
    found: dict[str, str] = {}
    seen = members | saved | {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}

    def look(value: Any, name: str) -> None:
        if isinstance(value, bool | int | float | str | bytes | None) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, AbsentTensor):
            return  # another process has it
        if isinstance(value, Tensor) and not value.is_meta:
            found[name] = f"{tuple(value.shape)} {int(sum_of_bits(value))}"
        elif isinstance(value, Mapping):
            for key, each in value.items():
                look(each, f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[...]")
        elif isinstance(value, list | tuple | set | deque):
            for place, each in enumerate(value):
                look(each, f"{name}[{place}]")
        elif isinstance(value, Optimizer):
            look(value.state, f"{name}.state")

    for key, value in vars(optimizer).items():
        if key not in ("defaults", "param_groups"):
            look(value, key)
    for parameter, value in optimizer.state.items():
        if id(parameter) not in members:
            name = f"state[{parameter!r}]" if isinstance(parameter, str) else "state[...]"
            if isinstance(value, bool | int | float | str):
                found[name] = repr(value)
            look(value, name)
    return found


def is_stored(name: str, model: nn.Module) -> bool:
    """True for a place, as a snapshot calls it, that a checkpoint holds: plain attributes, extra states."""
    for path, module in model.named_modules():
        owner = f" of {path or 'the model'}"
        if has_extra_state(module) and owner in name:
            return True
        places = [
            f"the attribute {key!r}{owner}"
            for key in (*numbers_of(module), *values_of(module), *generators_of(module))
        ]
        if any(name == place or name.startswith(f"{place}[") for place in places):
            return True
    return False
