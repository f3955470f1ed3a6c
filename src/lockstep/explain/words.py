"""Text for a terminal: tables that fold into blocks, numbers with their units, and what was left out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

WIDTH = 100


@dataclass(frozen=True)
class Chosen:
    """Which of many numbered things are drawn: the first ones, and the last."""

    shown: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, total: int, most: int) -> Chosen:
        """All of them if there are no more than ``most``; else the first ``most - 1`` and the last."""
        return cls(tuple(range(total)) if total <= most else (*range(most - 1), total - 1), total)

    def gap_before(self, number: int) -> bool:
        """Whether some are left out between this one and the one that is drawn before it."""
        return number > 0 and number - 1 not in self.shown

    def left_out(self, name: str) -> str:
        """Such as ``steps 5 to 98 of 100``; empty where all are drawn."""
        if len(self.shown) == self.total:
            return ""
        first, last = self.shown[-2] + 1, self.shown[-1] - 1
        some = f"{name}s {first} to {last}" if last > first else f"{name} {first}"
        return f"{some} of {self.total:,}"


def left_out(*parts: str) -> list[str]:
    """One line that names what is not drawn; none where all is."""
    named = [part for part in parts if part]
    return paragraph(f"Left out: {'; '.join(named)}.") if named else []


def at_least_one(**numbers: int) -> None:
    """Refuses counts below 1 (``ConfigError`` with the option's name)."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} should be at least 1 and is {value}.")


def plural(count: int, name: str) -> str:
    """Such as ``1 node``, ``3 nodes`` or ``3 micro-batches``."""
    many = f"{name}es" if name.endswith("ch") else f"{name}s"
    return f"{count:,} {name if count == 1 else many}"


def amount(count: float) -> str:
    """Bytes with a unit, three digits: ``87.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def paragraph(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """The lines of a text, none wider than ``width``."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def folded_table(corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A table whose columns go on below where they do not fit the width.

    Args:
        corner: heading of the row names.
        columns: heading of each column.
        rows: name and cells, a cell for each column.
    """
    lead = max(len(corner), *(len(name) for name, _ in rows)) + 2
    widths = [max(len(head), *(len(cells[i]) for _, cells in rows)) + 2 for i, head in enumerate(columns)]
    lines: list[str] = []
    first = 0
    while first < len(columns):
        stop = first + 1
        while stop < len(columns) and lead + sum(widths[first : stop + 1]) <= WIDTH + 2:
            stop += 1
        for name, cells in [(corner, columns), *rows]:
            line = "".join(f"{cells[i]:<{widths[i]}}" for i in range(first, stop))
            lines.append(f"{name:<{lead}}{line}".rstrip())
        lines += [""] if stop < len(columns) else []
        first = stop
    return lines
