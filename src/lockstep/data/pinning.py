"""Page-locked memory, from which tensors are copied to a GPU while something else goes on."""

from __future__ import annotations

from typing import Any

from lockstep.data.nested import map_leaves


def pinned(data: Any) -> Any:
    """The same tensors in page-locked memory, in tuples, lists and dicts of any depth."""
    return map_leaves(data, lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value)
