"""Words and numbers for messages: plurals, shortened lists, groups, shares, bytes and durations with their units."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """The second values of pairs by the first, all in the order in which they come."""
    found: dict[_K, list[_V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def plural(count: int, name: str) -> str:
    """A number and its noun: ``1 node``, ``3 nodes``, ``3 micro-batches``."""
    return f"{count:,} {_noun(count, name)}"


def numbered(name: str, numbers: Collection[int], limit: int = 16) -> str:
    """A noun and its numbers, with runs of them as a range: ``rank 3``, ``ranks 0-3, 5``."""
    return f"{_noun(len(numbers), name)} {ranges(numbers, limit)}"


def ranges(numbers: Iterable[int], limit: int = 16) -> str:
    """Numbers in ascending order, three or more in a row as a range: ``0-3, 5``; at most ``limit`` parts."""
    parts: list[str] = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)
    return shorten(parts, limit)


def shorten(items: Iterable[object], limit: int = 16) -> str:
    """Joins items with commas and counts those beyond ``limit``: ``a, b and 3 more``."""
    listed = [str(item) for item in items]
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest:,} more" if rest > 0 else "")


def comma_separated(text: str) -> list[str]:
    """The words of a list such as ``a, b``; none of an empty text."""
    return [word.strip() for word in text.split(",") if word.strip()]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """The lines of a report: a label of at most nine characters, and what it labels."""
    return [f"{label:9} {text}" for label, text in rows]


def at_most(limit: int, lines: Sequence[str]) -> list[str]:
    """The first ``limit`` lines, then one that counts the others: ``and 3 more``."""
    rest = len(lines) - limit
    return [*lines[:limit], *([f"and {rest:,} more"] if rest > 0 else [])]


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Bytes with a unit and three digits: ``87.2 MB``, or ``83.2 MiB`` where ``binary``."""
    if count < 999.5:
        return f"{count:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB") if binary else ("kB", "MB", "GB", "TB")
    step = 1024 if binary else 1000
    count /= step
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count /= step
        power += 1
    return f"{count:.3g} {units[power]}" if count < 999.5 else f"{count:,.0f} {units[power]}"


def format_duration(seconds: float) -> str:
    """Seconds for people: ``45 s``, ``3 min 20 s``, ``1 h 05 min``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def percent(share: float, digits: int = 2) -> str:
    """A share of 1 in percent: ``97.22 %``; what is less than all is not rounded to ``100.00 %``."""
    is_less = share < 1 - 1e-6  # a mean of ones in float32 may be as near
    return f"{min(100 * share, 100 - 10**-digits) if is_less else 100 * share:.{digits}f} %"


def samples_per_second(speed: float) -> str:
    """A speed with its unit: ``17,101 samples/s``, ``0.656 samples/s``."""
    return f"{speed:,.0f} samples/s" if speed >= 99.5 else f"{speed:.3g} samples/s"


def printable(text: str) -> str:
    """The text with control characters of names shown, such as ``\\x1b`` of a terminal's codes; lines and tabs stay.

    So are bytes of names that are not text, as ``\\udcff``, which standard output would not take.
    """
    return _CONTROL.sub(lambda found: f"\\{'x' if found[0] < chr(256) else 'u'}{ord(found[0]):02x}", text)


def _noun(count: int, name: str) -> str:
    if count == 1:
        return name
    return f"{name}es" if name.endswith(("tch", "ss")) else f"{name}s"
