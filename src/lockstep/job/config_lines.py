"""Finds the line of every key in a TOML text that has been parsed, since ``tomllib`` does not tell it."""

from __future__ import annotations

import re
from collections.abc import Callable

from lockstep.job.config_reader import KeyPath

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
