"""Reads nested tables (of TOML or JSON) into dataclasses, and back; collects every problem, not the first.

``line_of`` finds the line of a key in a TOML text, which ``tomllib`` does not tell.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
import tomllib
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

from lockstep.config.checks import (
    KeyPath,
    Problem,
    field_problem,
    field_types,
    import_path,
    nearest_name,
    spell,
    spell_types,
)
from lockstep.config.components import Component

_UNFINISHED = [
    quotes + "".join(brackets)
    for quotes in ("", '"""', "'''")
    for depth in range(5)
    for brackets in itertools.product("]}", repeat=depth)
]
"""Endings of which one completes a TOML text that is cut off after any line, within a string or a list too."""


def line_of(path: KeyPath, text: str) -> int | None:
    """The line (from 1) of a key of a TOML text, or of the innermost table around it that the text has.

    Items of a list are counted from 0. None where the text has none of them.
    """
    rows = text.split("\n")
    for length in range(len(path), 0, -1):
        key = path[:length]
        if _has_key(text, key):
            counts = range(1, len(rows) + 1)
            return 1 + bisect.bisect_left(counts, True, key=lambda n: _has_key("\n".join(rows[:n]), key))
    return None


def _has_key(text: str, path: KeyPath) -> bool:
    """True if the beginning of a TOML text has the key."""
    for ending in _UNFINISHED:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value: Any = tomllib.loads(f"{text}\n{ending}")
            for part in path:
                if isinstance(value, list):
                    value = dict(enumerate(value))
                if not isinstance(value, dict) or part not in value:
                    return False
                value = value[part]
            return True
    return False


C = TypeVar("C")


def read_table(cls: type[C], table: Any) -> tuple[C | None, list[Problem]]:
    """Reads one dataclass; returns it, or None and all problems."""
    problems: list[Problem] = []
    config = _TableReader(problems, cls).section(cls, table, ())
    return (None, problems) if problems else (config, problems)


def to_table(config: Any) -> dict[str, Any]:
    """The nested table that `read_table` reads back as an equal dataclass; None is left out."""
    if isinstance(config, Component):
        return {"target": config.target, **config.args}
    values = {name: getattr(config, name) for name in field_types(typing.cast(Hashable, type(config)))}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


class _TableReader:
    """Walks a table beside the dataclass it should fill."""

    def __init__(self, problems: list[Problem], root: type) -> None:
        self._problems = problems
        of_optimizer = {name: ("optimizer", name) for name in ("lr", "weight_decay", "momentum")}
        self._homes = {**dict(_settings(root, ())), **of_optimizer}

    def section(self, cls: type[C], table: Any, path: KeyPath) -> C | None:
        """One dataclass, or None after a problem."""
        if not isinstance(table, Mapping):
            self._type(path, "a table", table)
            return None
        known, values, sound = field_types(typing.cast(Hashable, cls)), {}, True
        for key in table:
            if key not in known:
                self._unknown((*path, key), known)
                sound = False
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass, which type[C] cannot say
            here = (*path, field.name)
            if table.get(field.name) is not None:
                value = self.value(known[field.name], table[field.name], here)
                problem = field_problem(field, value)
                if problem:
                    self._problems.append(Problem(here, problem))
                values[field.name] = value
                sound = sound and value is not None and not problem
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                sound = False
                self._problems.append(Problem(here, f"is missing: a job needs {_missing(known[field.name], here)}"))
        return cls(**values) if sound else None

    def value(self, kind: Any, value: Any, path: KeyPath) -> Any:
        """A value of the kind, or None after a problem."""
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if isinstance(kind, types.UnionType) and len(options) == 1:
            return self.value(options[0], value, path)
        if isinstance(kind, types.UnionType) and Component in options:
            given = isinstance(value, Mapping) and "target" in value
            return self.value(Component if given else options[0], value, path)
        if kind is Component:
            return self.component(value, path)
        if dataclasses.is_dataclass(kind):
            return self.section(typing.cast(type, kind), value, path)
        if typing.get_origin(kind) is Mapping:
            if not isinstance(value, Mapping):
                return self._type(path, "a table of tables with a target", value)
            return {key: self.value(options[-1], item, (*path, key)) for key, item in value.items()}
        if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(options[0]):
            if not isinstance(value, list | tuple):
                return self._type(path, "a list of tables", value)
            return tuple(self.value(options[0], item, (*path, n)) for n, item in enumerate(value))
        if typing.get_origin(kind) is tuple:
            texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            return tuple(value) if texts else self._type(path, "a list of strings", value)
        wanted = typing.get_args(kind) or (kind,)
        if isinstance(value, bool):
            return value if bool in wanted else self._type(path, spell_types(wanted), value)
        if isinstance(value, int) and float in wanted and int not in wanted and abs(value) < 1 << 53:
            return float(value)
        return value if isinstance(value, wanted) else self._type(path, spell_types(wanted), value)

    def component(self, table: Any, path: KeyPath) -> Component | None:
        """A component, its arguments checked as far as they can be without importing anything."""
        if not isinstance(table, Mapping):
            self._type(path, "a table with a target", table)
            return None
        before = len(self._problems)
        if "target" not in table:
            self._problems.append(Problem((*path, "target"), "is missing: give an import path 'package.module:name'."))
        self._arguments(table, path)
        if len(self._problems) > before:
            return None
        return Component(target=table["target"], args={key: table[key] for key in table if key != "target"})

    def _arguments(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                here = (*path, key)
                if key not in ("target", "object"):
                    self._arguments(item, here)
                elif not isinstance(item, str):
                    self._type(here, "an import path", item)
                elif problem := import_path(item):
                    self._problems.append(Problem(here, problem))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                self._arguments(item, (*path, number))
        elif value is None:
            self._problems.append(Problem(path, "is not in the job, so there is nothing to leave out."))
        elif not isinstance(value, str | int | float) or (isinstance(value, float) and math.isnan(value)):
            self._type(path, "a string, number, boolean, list or table", value)

    def _type(self, path: KeyPath, wanted: str, value: Any) -> None:
        message = f"should be {wanted} and is {_found(value)}."
        self._problems.append(Problem(path, message if path else f"A job {message}"))

    def _unknown(self, path: KeyPath, known: Mapping[str, Any]) -> None:
        key = str(path[-1])
        home = self._homes.get(key)
        hint = f" Did you mean {spell(home)!r}?" if home and home != path else nearest_name(key, known)
        self._problems.append(Problem(path, f"is not a known setting.{hint}"))


def _settings(cls: type, path: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Every setting's name with the path where it belongs; of a name in two tables the last comes last."""
    for name, kind in field_types(cls).items():
        options = [option for option in (typing.get_args(kind) or (kind,)) if option is not Component]
        inner = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if inner is not None:
            yield from _settings(typing.cast(type, inner), (*path, name))
        elif path:
            yield name, (*path, name)


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value) if isinstance(value, str | int | float) else f"{value} ({type(value).__name__})"
    return text if len(text) < 60 else text[:56] + "..."


def _missing(kind: Any, path: KeyPath) -> str:
    if kind is Component:
        return f"a table [{spell(path)}] with a target, an import path 'package.module:name'."
    return f"a table [{spell(path)}]." if dataclasses.is_dataclass(kind) else "it."
