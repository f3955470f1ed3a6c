"""Puts tensors where the processor's matrix kernels treat all alike.

Vectorised kernels may take another order of additions where memory does not begin at a multiple of 64 bytes.
torch's own memory does; arrays from NumPy and views into larger tensors need not, and where they begin could
depend on who read them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.data.nested import map_leaves

ALIGNMENT = 64
"""Bytes that the first element of a tensor is to be a multiple of."""


def aligned(data: Any) -> Any:
    """The same values, each CPU tensor at a multiple of 64 bytes; copied only where it is not.

    Page-locked tensors stay where they are: nothing is computed on them before they are on their device.
    """
    return map_leaves(data, _aligned)


def _aligned(value: Any) -> Any:
    crooked = isinstance(value, Tensor) and value.device.type == "cpu" and value.data_ptr() % ALIGNMENT
    return value.clone() if crooked and not value.is_pinned() else value
