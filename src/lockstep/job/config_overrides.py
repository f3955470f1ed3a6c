"""Values that the command line puts over those of a job file: ``--set optimizer.lr=0.1``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError
from lockstep.job.config_reader import Problem, spell


@dataclass(frozen=True, kw_only=True)
class Override:
    """One value and the option that gave it."""

    path: tuple[str, ...]
    """Keys from the outermost table to the value; the number of an item, from 0, in a list."""
    value: Any
    """The value, of the types that TOML has."""
    origin: str
    """The option as the user wrote it, for messages."""


def parse_set(text: str) -> Override:
    """Reads ``key.key=value``; the value is written as in TOML, and a text needs no quotes."""
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(
            f"--set {text}: should be a key, '=' and a value, for example --set optimizer.lr=0.1."
        )
    return Override(path=parts, value=toml_value(value.strip()), origin=f"--set {text}")


def toml_value(text: str) -> Any:
    """The value that a text means in TOML; the text itself where it means none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> list[Problem]:
    """Writes the values into the table, later ones over earlier ones; returns those that have no place."""
    problems = []
    for override in overrides:
        inner: Any = table
        for number, part in enumerate(override.path):
            last = number == len(override.path) - 1
            if isinstance(inner, dict):
                if last:
                    inner[part] = override.value
                else:
                    inner = inner.setdefault(part, {})
            elif isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
                if last:
                    inner[int(part)] = override.value
                else:
                    inner = inner[int(part)]
            else:
                holder = override.path[:number]
                kind = f"a list of {len(inner)}" if isinstance(inner, list) else "a single value"
                problems.append(Problem(override.path, f"cannot be set: {spell(holder)} is {kind}."))
                break
    return problems
