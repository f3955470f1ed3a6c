"""Puts tensors where the processor's matrix kernels treat all alike.

Vectorised kernels may take another order of additions where memory does not begin at a multiple of 64 bytes.
torch's own memory does; arrays from NumPy and views into larger tensors need not, and where they begin could
depend on who read them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNMENT = 64
"""Bytes that the first element of a tensor is to be a multiple of."""


def aligned(data: Any) -> Any:
    """The same values, each CPU tensor at a multiple of 64 bytes; copied only where it is not."""
    if isinstance(data, Tensor):
        return data.clone() if data.data_ptr() % ALIGNMENT and data.device.type == "cpu" else data
    if isinstance(data, dict):
        return {name: aligned(value) for name, value in data.items()}
    if isinstance(data, list):
        return [aligned(value) for value in data]
    if isinstance(data, tuple):
        values = [aligned(value) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return data
