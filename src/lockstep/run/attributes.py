"""What optimizers and modules keep in attributes, which no ``state_dict()`` has. Checkpoints hold what is plain there.

Of optimizers that is numbers; of modules also texts, small tensors, and lists, tuples and dicts of plain values.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.manifest import decode, encode
from lockstep.core.fingerprint import sum_of_bits
from lockstep.distributed.collectives import gather_json
from lockstep.strategies.absent import AbsentTensor

_OF_TORCH = (
    *("_opt_called", "_step_count", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_is_full_backward_hook"),
)
"""Attributes by which torch's own optimizers, schedulers and modules know what they do in this process."""
_OF_MODULES = frozenset(vars(nn.Module()))


def numbers_of(holder: Any) -> dict[str, str]:
    """The numbers among an object's attributes, as texts from which they can be read back.

    Those of a module have its mode, ``training``.
    """
    return {
        name: repr(value)
        for name, value in vars(holder).items()
        if type(value) in (bool, int, float) and name not in _OF_TORCH
    }


def decoded(attributes: Mapping[str, str]) -> dict[str, bool | int | float]:
    """The numbers again."""
    words = {"True": True, "False": False}
    return {
        name: words[text] if text in words else int(text) if text.lstrip("-").isdigit() else float(text)
        for name, text in attributes.items()
    }


class Attributes:
    """What optimizers and modules keep in attributes, beside what they kept when this was made.

    Args:
        optimizers: the user's own.
        model: of whose modules.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
        self._optimizers, self._model = optimizers, model
        self._first = self._held()

    def changed(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
        """What has changed since, as texts by holder and attribute. Collective.

        Args:
            group: of processes that hold different parts; None where this one has all.
            device: of the exchange.
        """
        mine: dict[str, dict[str, dict[str, str]]] = {}
        for kind, holders in self._held().items():
            for name, texts in holders.items():
                first = self._first[kind].get(name, {})
                if changed := {key: text for key, text in texts.items() if first.get(key) != text}:
                    mine.setdefault(kind, {})[name] = changed
        if group is None:
            return mine
        found: dict[str, dict[str, dict[str, str]]] = {}
        # A process that steps no optimizer, as a worker of a parameter server, knows the first numbers only.
        for theirs in reversed(gather_json(mine, group, device)):
            for kind, holders in theirs.items():
                for name, changed in holders.items():
                    found.setdefault(kind, {}).setdefault(name, {}).update(changed)
        return found

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Sets what ``changed`` gave."""
        for name, holder in self._holders().items():
            vars(holder).update(decoded(stored.get("attributes", {}).get(name, {})))
        modules = dict(self._model.named_modules())
        for name, values in stored.get("values", {}).items():
            set_values(modules[name], values)

    def _holders(self) -> dict[str, Any]:
        """What may keep numbers as attributes, which no ``state_dict`` has."""
        optimizers = {f"optimizer {number}": each for number, each in enumerate(self._optimizers)}
        return optimizers | {f"module {name}": each for name, each in self._model.named_modules()}

    def _held(self) -> dict[str, dict[str, dict[str, str]]]:
        """The numbers of all, and what else modules hold, as texts by holder and attribute."""
        return {
            "attributes": {name: numbers_of(holder) for name, holder in self._holders().items()},
            "values": {name: values_of(module) for name, module in self._model.named_modules()},
        }


_MOST_ENTRIES, _MOST_NUMBERS = 64, 4096
"""Of a list, tuple or dict, and of a tensor: larger ones are caches and notes, more often than settings."""


def values_of(module: nn.Module) -> dict[str, str]:
    """The plain values among a module's attributes that are no numbers, and its small tensors, as texts.

    Tensors are those that no ``state_dict()`` has: attributes, and buffers with ``persistent=False``.
    """
    found = {
        name: json.dumps(encode(value, name))
        for name, value in vars(module).items()
        if type(value) in (str, type(None), list, tuple, dict)
        and name not in _OF_MODULES
        and _is_plain(value)
    }
    tensors = {name: value for name, value in vars(module).items() if _is_small(value)}
    buffers = {name: module._buffers.get(name) for name in sorted(module._non_persistent_buffers_set)}
    tensors |= {name: buffer for name, buffer in buffers.items() if _is_small(buffer)}
    return found | {name: json.dumps({_TENSOR: _numbers(tensor)}) for name, tensor in tensors.items()}


def set_values(module: nn.Module, stored: Mapping[str, str]) -> None:
    """Gives a module what ``values_of`` gave of it, tensors in place: others may refer to them."""
    for name, text in stored.items():
        value, own = decode(json.loads(text)), module._buffers.get(name, vars(module).get(name))
        if not isinstance(value, dict) or value.keys() != {_TENSOR}:
            vars(module)[name] = value
            continue
        dtype, shape, numbers = value[_TENSOR]
        tensor = torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
        if isinstance(own, AbsentTensor):
            continue  # another process has it
        if type(own) is Tensor and own.shape == tensor.shape and own.dtype == tensor.dtype:
            with torch.no_grad():
                own.copy_(tensor)
            continue
        device = own.device if isinstance(own, Tensor) else tensor.device
        (module._buffers if name in module._buffers else vars(module))[name] = tensor.to(device)


_TENSOR = "tensor values"
"""Marks what stands for a tensor."""


def _is_plain(value: Any) -> bool:
    """True for numbers, texts, None, and for short lists, tuples and dicts by texts of such."""
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ENTRIES and all(map(_is_plain, value))
    if type(value) is dict:
        plain = len(value) <= _MOST_ENTRIES and all(type(key) is str for key in value)
        return plain and all(map(_is_plain, value.values()))
    return type(value) in (bool, int, float, str, type(None))


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
