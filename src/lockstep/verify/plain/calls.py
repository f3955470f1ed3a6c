"""Which module's output became which module's input: the order of the layers, on one rank or over many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.fingerprint import digest_tensor


def watch_calls(model: nn.Module, note: Callable[[str, str, str], None]) -> Callable[[], None]:
    """Notes every call of an innermost module while gradients are recorded.

    Args:
        model: whose modules are watched.
        note: is given name, digest of the first input and digest of the output.

    Returns:
        A function that ends it.
    """
    handles = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()) and name:
            came: list[str] = []
            handles.append(module.register_forward_pre_hook(_before(came)))
            handles.append(module.register_forward_hook(_after(name, came, note)))

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def _before(came: list[str]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, arguments: Any) -> None:
        came[:] = [_digest(arguments)]  # before the module may change it in place

    return hook


def _after(
    name: str, came: list[str], note: Callable[[str, str, str], None]
) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled() and came:
            note(name, came[0], _digest(output))

    return hook


def _digest(value: Any) -> str:
    """Of the first tensor, without its shape: flattening changes no values."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return digest_tensor(first.reshape(-1))[:16] if isinstance(first, Tensor) else ""
