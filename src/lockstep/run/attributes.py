"""What optimizers and modules keep in attributes, which no ``state_dict()`` has. Checkpoints hold the numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.fingerprint import sum_of_bits
from lockstep.strategies.absent import AbsentTensor

_OF_TORCH = (
    *("_opt_called", "_step_count", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"),
    *("training", "_is_full_backward_hook"),
)
"""Attributes by which torch's own optimizers, schedulers and modules know what they do in this process."""


def numbers_of(holder: Any) -> dict[str, str]:
    """The numbers among an object's attributes, as texts from which they can be read back."""
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
