"""Data in tuples, lists and dicts of any depth, as collate functions give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_leaves(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same with all changed that is no tuple, list or dict."""
    if isinstance(data, dict):
        return {name: map_leaves(value, change) for name, value in data.items()}
    if isinstance(data, list):
        return [map_leaves(value, change) for value in data]
    if isinstance(data, tuple):
        values = [map_leaves(value, change) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return change(data)
