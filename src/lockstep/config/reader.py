"""Reads nested tables (of TOML or JSON) into dataclasses, and back; collects every problem, not the first.

``key_lines`` finds the line of every key in a TOML text, which ``tomllib`` does not tell.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from lockstep.config.checks import KeyPath, Problem, field_problem, import_path, nearest_name, spell
from lockstep.config.components import Component

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r'[ \t]*(?:([\w-]+)|"((?:\\.|[^"\\\n])*)"|\'([^\'\n]*)\')[ \t]*(\.?)')
_BARE_VALUE = re.compile(r"[^,\]}\n#]*")
_STRINGS = (
    re.compile(r'"""(?:\\.|[^\\])*?"""+', re.DOTALL),
    re.compile(r"'''.*?'''+", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\\n])*"'),
    re.compile(r"'[^'\n]*'"),
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of each table header and key, by its path; items of a list are counted from 0.

    The text must be valid TOML; from another text some keys are missing.
    """
    return _Scanner(text).document()


def line_of(path: KeyPath, lines: dict[KeyPath, int]) -> int | None:
    """The line of a key, or of the innermost table around it that the text has; None where it has none."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[KeyPath, int] = {}
        self._counts: dict[KeyPath, int] = {}

    def document(self) -> dict[KeyPath, int]:
        """Reads header after header and key after key."""
        table: KeyPath = ()
        while self._skip():
            start = self._at
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            if self._at == start:
                break
        return self._lines

    def _header(self) -> KeyPath:
        double = self._text.startswith("[[", self._at)
        line = self._line()
        self._at += 2 if double else 1
        path = self._inside_lists(self._key())
        if double:
            self._counts[path] = self._counts.get(path, -1) + 1
            path = (*path, self._counts[path])
        self._at += 2 if double else 1
        self._note(path, line)
        return path

    def _inside_lists(self, key: KeyPath) -> KeyPath:
        path: KeyPath = ()
        for number, part in enumerate(key):
            path = (*path, part)
            if number < len(key) - 1 and path in self._counts:
                path = (*path, self._counts[path])
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        for length in range(len(table) + 1, len(path) + 1):
            self._note(path[:length], line)
        self._skip()
        if self._text.startswith("=", self._at):
            self._at += 1
            self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._skip()
        opening = self._text[self._at : self._at + 1]
        if opening == "{":
            self._items("}", lambda _: self._pair(path))
        elif opening == "[":
            self._items("]", lambda number: self._item((*path, number)))
        elif opening and opening in "\"'":
            for string in _STRINGS:
                found = string.match(self._text, self._at)
                if found:
                    self._at = found.end()
                    return
        else:
            found = _BARE_VALUE.match(self._text, self._at)
            self._at = found.end() if found else self._at

    def _item(self, path: KeyPath) -> None:
        self._note(path, self._line())
        self._value(path)

    def _items(self, closing: str, read: Callable[[int], None]) -> None:
        self._at += 1
        number = 0
        while self._skip() and self._text[self._at] != closing:
            start = self._at
            read(number)
            number += 1
            if self._skip() and self._text[self._at] == ",":
                self._at += 1
            if self._at == start:
                return
        self._at += 1

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while found := _KEY_PART.match(self._text, self._at):
            self._at = found.end()
            parts.append(next(part for part in found.groups()[:3] if part is not None))
            if not found.group(4):
                break
        return tuple(parts)

    def _skip(self) -> bool:
        found = _BLANK.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _note(self, path: KeyPath, line: int) -> None:
        self._lines.setdefault(path, line)


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
    table: dict[str, Any] = {}
    for name in _types(typing.cast(Hashable, type(config))):
        value = getattr(config, name)
        if value is not None:
            table[name] = to_table(value) if dataclasses.is_dataclass(value) else _plain(value)
    return table


class _TableReader:
    """Walks a table beside the dataclass it should fill."""

    def __init__(self, problems: list[Problem], root: type) -> None:
        self._problems = problems
        self._homes = dict(_settings(root, ()))

    def section(self, cls: type[C], table: Any, path: KeyPath) -> C | None:
        """One dataclass, or None after a problem."""
        if not isinstance(table, Mapping):
            self._type(path, "a table", table)
            return None
        known, values, sound = _types(typing.cast(Hashable, cls)), {}, True
        for key in table:
            if key not in known:
                self._unknown((*path, key), known)
                sound = False
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass, which type[C] cannot say
            here = (*path, field.name)
            if field.name in table:
                value = self.value(known[field.name], table[field.name], here)
                problem = field_problem(field, value)
                if problem:
                    self._problems.append(Problem(here, problem))
                values[field.name] = value
                sound = sound and value is not None and not problem
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                sound = False
                self._problems.append(
                    Problem(here, f"is missing: a job needs {_missing(known[field.name], here)}")
                )
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
        if typing.get_origin(kind) is tuple:
            texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            return tuple(value) if texts else self._type(path, "a list of texts", value)
        return self._scalar(kind, value, path)

    def component(self, table: Any, path: KeyPath) -> Component | None:
        """A component, its arguments checked as far as they can be without importing anything."""
        if not isinstance(table, Mapping):
            self._type(path, "a table with a target", table)
            return None
        before = len(self._problems)
        if "target" not in table:
            self._problems.append(
                Problem((*path, "target"), "is missing: give an import path 'package.module:name'.")
            )
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
        elif not isinstance(value, str | int | float) or (isinstance(value, float) and math.isnan(value)):
            self._type(path, "a text, number, truth value, list or table", value)

    def _scalar(self, kind: Any, value: Any, path: KeyPath) -> Any:
        wanted = typing.get_args(kind) or (kind,)
        if isinstance(value, bool):
            return value if bool in wanted else self._type(path, _named(wanted), value)
        if isinstance(value, int) and float in wanted and int not in wanted and abs(value) < 1 << 53:
            return float(value)
        return value if isinstance(value, wanted) else self._type(path, _named(wanted), value)

    def _type(self, path: KeyPath, wanted: str, value: Any) -> None:
        message = f"should be {wanted} and is {_found(value)}."
        self._problems.append(Problem(path, message if path else f"A job {message}"))

    def _unknown(self, path: KeyPath, known: Mapping[str, Any]) -> None:
        key = str(path[-1])
        home = self._homes.get(key)
        if home and home != path:
            hint = f" Did you mean {spell(home)!r}?"
        else:
            hint = nearest_name(key, known)
        self._problems.append(Problem(path, f"is not a known setting.{hint}"))


@cache
def _types(cls: Hashable) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, cls))}


def _settings(cls: type, path: KeyPath) -> Iterator[tuple[str, KeyPath]]:
    """Every setting's name with the path where it belongs; of a name in two tables the last comes last."""
    for name, kind in _types(cls).items():
        options = [option for option in (typing.get_args(kind) or (kind,)) if option is not Component]
        inner = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if inner is not None:
            yield from _settings(typing.cast(type, inner), (*path, name))
        elif path:
            yield name, (*path, name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _named(kinds: tuple[Any, ...]) -> str:
    return " or ".join(_NAMES[kind] for kind in kinds if kind in _NAMES)


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
