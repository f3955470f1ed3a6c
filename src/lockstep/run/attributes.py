"""What optimizers and modules keep in attributes, which no ``state_dict()`` has. Checkpoints hold the numbers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.manifest import decode, encode
from lockstep.core.fingerprint import sum_of_bits
from lockstep.strategies.absent import AbsentTensor

_OF_TORCH = (
    *("_opt_called", "_step_count", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"),
    *("training", "_is_full_backward_hook"),
)
"""Attributes by which torch's own optimizers, schedulers and modules know what they do in this process."""
_OF_BASES = frozenset(vars(nn.Module())) | {"defaults", "state", "param_groups"}
_MOST_ENTRIES = 1_000


def numbers_of(holder: Any) -> dict[str, str]:
    """The numbers among an object's attributes, as texts from which they can be read back.

    Also those in lists, deques and dicts of nothing but numbers, texts and None.
    """
    found = {}
    for name, value in vars(holder).items():
        if name in _OF_TORCH or name in _OF_BASES:
            continue
        if type(value) in (bool, int, float):
            found[name] = hex(value) if type(value) is int and value.bit_length() > 1000 else repr(value)
        elif type(value) in (list, deque, dict) and _holds_numbers(value):
            found[name] = json.dumps(encode(list(value) if type(value) is deque else value, name))
    return found


def _holds_numbers(container: Any, depth: int = 3) -> bool:
    """Returns whether a container has at most 1,000 entries, which are numbers, texts, None, or such containers."""
    if len(container) > _MOST_ENTRIES or not depth:
        return False
    values = [*container.keys(), *container.values()] if type(container) is dict else container
    return all(
        value is None
        or type(value) in (bool, int, float, str)
        or (type(value) in (list, tuple, dict) and _holds_numbers(value, depth - 1))
        for value in values
    )


def set_numbers(holder: Any, attributes: Mapping[str, str]) -> None:
    """Gives an object what ``numbers_of`` found; containers are filled anew, so that all who hold them see it."""
    for name, value in decoded(attributes).items():
        own = vars(holder).get(name)
        if type(own) is dict and isinstance(value, dict):
            own.clear()
            own.update(value)
        elif type(own) in (list, deque) and isinstance(value, list):
            own.clear()
            own.extend(value)
        else:
            vars(holder)[name] = value


def decoded(attributes: Mapping[str, str]) -> dict[str, Any]:
    """The values again; those of deques as lists."""
    words = {"True": True, "False": False}
    return {
        name: words[text]
        if text in words
        else decode(json.loads(text))
        if text[:1] in ("[", "{")
        else int(text, 0)
        if text.lstrip("-").startswith("0x") or text.lstrip("-").isdigit()
        else float(text)
        for name, text in attributes.items()
    }


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
