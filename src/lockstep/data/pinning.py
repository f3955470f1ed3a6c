"""Page-locked memory, from which tensors are copied to a GPU while something else goes on."""

from __future__ import annotations

from typing import Any


def pinned(data: Any) -> Any:
    """The same tensors in page-locked memory, in tuples, lists and dicts of any depth."""
    if isinstance(data, dict):
        return {name: pinned(value) for name, value in data.items()}
    if isinstance(data, list):
        return [pinned(value) for value in data]
    if isinstance(data, tuple):
        values = [pinned(value) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return data.pin_memory() if hasattr(data, "pin_memory") else data
