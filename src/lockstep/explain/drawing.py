"""Text and drawings of the pictures: tables that fold into blocks, and self-contained SVG.

An SVG has no script, font or address, is light or dark as the reader's system is, and grows with its shapes, so that
nothing is cut off at an edge.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, cast

from lockstep.errors import ConfigError

WIDTH = 100


@dataclass(frozen=True)
class Chosen:
    """The drawn ones of many numbered things: the first ones, and the last."""

    shown: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, total: int, most: int) -> Chosen:
        """All of them if there are no more than ``most``; else the first ``most - 1`` and the last."""
        return cls(tuple(range(total)) if total <= most else (*range(most - 1), total - 1), total)

    def gap_before(self, number: int) -> bool:
        """True if some are left out between this one and the drawn one before it."""
        return number > 0 and number - 1 not in self.shown

    def names(self, name: str) -> list[str]:
        """Such as ``rank 0``; ``.. rank 9`` where some before it are left out."""
        return [f"{'.. ' if self.gap_before(number) else ''}{name} {number}" for number in self.shown]

    def left_out(self, name: str) -> str:
        """Such as ``steps 5 to 98 of 100``; empty where all are drawn."""
        if len(self.shown) == self.total:
            return ""
        first, last = self.shown[-2] + 1, self.shown[-1] - 1
        some = f"{name}s {first} to {last}" if last > first else f"{name} {first}"
        return f"{some} of {self.total:,}"


class PictureFacts:
    """Base of the dataclasses that hold the contents of a picture."""

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return asdict(cast(Any, self))


def left_out(*parts: str) -> list[str]:
    """The lines that name what is left out; none where nothing is."""
    named = [part for part in parts if part]
    return paragraph(f"Left out: {'; '.join(named)}.") if named else []


def at_least_one(**numbers: int) -> None:
    """Raises ``ConfigError`` with the option's name for a count below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} should be at least 1 and is {value}.")


def paragraph(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """The lines of a text, none wider than ``width``."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def folded_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A table of named rows, whose columns continue below where they do not fit."""
    lead = max(len(name) for name, _ in rows) + 2
    widths = [max(len(head), *(len(cells[i]) for _, cells in rows)) + 2 for i, head in enumerate(columns)]
    lines: list[str] = []
    first = 0
    while first < len(columns):
        stop = first + 1
        while stop < len(columns) and lead + sum(widths[first : stop + 1]) <= WIDTH + 2:
            stop += 1
        for name, cells in [("", columns), *rows]:
            line = "".join(f"{cells[i]:<{widths[i]}}" for i in range(first, stop))
            lines.append(f"{name:<{lead}}{line}".rstrip())
        lines += [""] if stop < len(columns) else []
        first = stop
    return lines


MARGIN = 20.0
CAPTION_CHARACTERS = 118
LETTER = 0.62  # of the size of the font; wider than the widest common monospace letter
_RANKS = (
    ("#d6e6fb", "#2f6db5", "#183a5e", "#79b0ee"),
    ("#fde3cd", "#b8621b", "#553010", "#f0a868"),
    ("#d8efd9", "#39803d", "#1d4420", "#83c987"),
    ("#ecdcf5", "#7e45a0", "#43235a", "#c597e0"),
    ("#fbd9dd", "#b53a4a", "#5a1d26", "#f08e9b"),
    ("#d5eff0", "#22797e", "#123f42", "#74c5ca"),
    ("#f6ecc4", "#8a7212", "#463a0a", "#d9c25c"),
    ("#e4e4e4", "#5f5f5f", "#3b3b3b", "#b5b5b5"),
)


class Drawing:
    """Collects shapes and writes them as SVG. Lengths are pixels, from the upper left corner.

    Args:
        title: heading of the picture, also for screen readers.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shapes: list[str] = []
        self._width = self.bottom = 0.0
        """The greatest x and the lowest y in use."""
        self.text(0, 8, title, "title", size=16)

    def text(self, x: float, y: float, words: str, style: str = "word", *, size: int = 13, at: str = "start") -> None:
        """One line of text, centred at height ``y``; ``x`` is its ``start``, ``middle`` or ``end``, as ``at`` says.

        Styles are ``word``, ``soft`` (less important), ``title`` and ``strong``.
        """
        width = len(words) * size * LETTER
        self._reach(x + {"start": width, "middle": width / 2, "end": 0}[at], y + size)
        self._shapes.append(text_element(x, y, words, f'class="{style}"', size=size, at=at))

    def caption(self, *paragraphs: str) -> None:
        """Paragraphs below everything drawn so far."""
        for words in paragraphs:
            y = self.bottom + 18
            for line in paragraph(words, CAPTION_CHARACTERS):
                self.text(0, y, line, "soft", size=12)
                y += 18

    def box(self, x: float, y: float, width: float, height: float, style: str, words: str = "") -> None:
        """A rounded box with centred words; styles are those of ``rank_style``, ``blank`` (outline) and ``alarm``."""
        self._reach(x + width, y + height)
        self._shapes.append(box_element(x, y, width, height, f'class="{style}"', radius=3))
        if words:
            self.text(x + width / 2, y + height / 2, words, size=12, at="middle")

    def line(self, points: Sequence[tuple[float, float]], style: str = "edge", *, arrow: bool = False) -> None:
        """A line through (x, y) points; the style is ``edge``, ``strong-edge`` or ``dashed``."""
        for x, y in points:
            self._reach(x, y)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._shapes.append(line_element(points, f'class="{style}"{end}'))

    def svg(self) -> str:
        """The contents of the file."""
        width, height = self._width + 2 * MARGIN, self.bottom + 2 * MARGIN
        elements = [
            f'<title id="title">{escape(self._title)}</title>',
            f"<style>\n{_style()}\n</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto" markerUnits="userSpaceOnUse"><path class="head" d="M0,0.5 L8,4 L0,7.5 z"/>'
            "</marker></defs>",
            box_element(-MARGIN, -MARGIN, width, height, 'class="page"', radius=6),
            *self._shapes,
        ]
        return document(width, height, elements, 'aria-labelledby="title"', margin=MARGIN)

    def _reach(self, x: float, y: float) -> None:
        self._width, self.bottom = max(self._width, x), max(self.bottom, y)


def document(width: float, height: float, elements: Sequence[str], look: str, *, margin: float = 0.0) -> str:
    """An SVG file of elements, from back to front; x and y begin at ``-margin``, ``look`` is further attributes."""
    size = f'width="{_number(width)}" height="{_number(height)}"'
    box = f'viewBox="{_number(-margin)} {_number(-margin)} {_number(width)} {_number(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" {look}>'
    return "\n".join([head, *elements, "</svg>\n"])


def box_element(x: float, y: float, width: float, height: float, look: str, *, radius: int = 0) -> str:
    """A rectangle, with rounded corners where ``radius`` is given; ``look`` is further attributes."""
    end = f' rx="{radius}"' if radius else ""
    where = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f"<rect {look} {where}{end}/>"


def line_element(points: Sequence[tuple[float, float]], look: str) -> str:
    """A line through (x, y) points; ``look`` is further attributes."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return f'<polyline {look} points="{path}"/>'


def text_element(x: float, y: float, words: str, look: str, *, size: int, at: str) -> str:
    """One line of text, as of ``Drawing.text``; ``look`` is further attributes."""
    anchor = "" if at == "start" else f' text-anchor="{at}"'
    place = f'x="{_number(x)}" y="{_number(y + size * 0.35)}" font-size="{size}"{anchor}'
    return f"<text {look} {place}>{escape(words)}</text>"


def rank_style(rank: int) -> str:
    """The style of a rank's shapes: one of eight colours."""
    return f"rank{rank % len(_RANKS)}"


def short(words: str, width: float, size: int = 12) -> str:
    """The words, shortened to a width; empty if not even one letter fits."""
    most = int(width / (size * LETTER))
    return words if len(words) <= most else f"{words[: most - 2]}.." if most > 2 else ""


def _number(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # never -0


_FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _style() -> str:
    looks = {
        ".page": ("fill:#ffffff;stroke:#d0d7de", "fill:#0d1117;stroke:#30363d"),
        "text": (f"font-family:{_FONTS};fill:#1f2328", "fill:#e6edf3"),
        ".title,.strong": ("font-weight:bold", ""),
        ".soft": ("fill:#59636e", "fill:#9da7b1"),
        ".blank": ("fill:none;stroke:#b6bec7", "stroke:#4a525b"),
        ".alarm": ("fill:#ffd0d0;stroke:#c01818;stroke-width:2.5", "fill:#6b1620;stroke:#ff7b72"),
        ".edge,.dashed,.strong-edge": ("fill:none;stroke:#6b7580;stroke-width:1.4", "stroke:#9da7b1"),
        ".strong-edge": ("stroke:#1f2328;stroke-width:2.4", "stroke:#e6edf3"),
        ".dashed": ("stroke:#c3cad2;stroke-dasharray:4 4", "stroke:#3d454e"),
        ".head": ("fill:#6b7580", "fill:#9da7b1"),
    }
    for number, (fill, edge, dark_fill, dark_edge) in enumerate(_RANKS):
        looks[f".rank{number}"] = f"fill:{fill};stroke:{edge}", f"fill:{dark_fill};stroke:{dark_edge}"
    day = [f"{name}{{{light}}}" for name, (light, _) in looks.items()]
    night = "\n".join(f"{name}{{{dark}}}" for name, (_, dark) in looks.items() if dark)
    return "\n".join([*day, f"@media (prefers-color-scheme:dark){{\n{night}\n}}"])
