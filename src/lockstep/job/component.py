"""An object that a job file gives by import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.checks import check_fields, import_path


@dataclass(frozen=True, kw_only=True)
class Component:
    """An import path and the keyword arguments of the call that makes the object.

    In a job file it is one table: ``target`` is the path and every other key an argument. An argument may be
    such a table too, which is made first; ``{object = "a.b:c"}`` stands for ``c`` as it is, not called.
    """

    target: str = field(metadata={"check": import_path})
    """Where it is found: ``package.module:name``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name: texts, numbers, truth values, lists and tables."""

    def __post_init__(self) -> None:
        check_fields(self)
