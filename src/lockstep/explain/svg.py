"""Drawings as one self-contained SVG: no script, no font, no address; light and dark as the reader's system is.

The size of a drawing follows from what is in it, so nothing can be cut off at its edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.explain.words import paragraph

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
        title: what the picture shows; stands above it, and is read out for who cannot see it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shapes: list[str] = []
        self._width = self._height = 0.0
        self.text(0, 8, title, "title", size=16)

    @property
    def bottom(self) -> float:
        """The lowest y that is used so far."""
        return self._height

    def text(
        self, x: float, y: float, words: str, style: str = "word", *, size: int = 13, at: str = "start"
    ) -> None:
        """Words on one line, whose middle has height ``y``.

        Args:
            x: where ``at`` says: their ``start``, ``middle`` or ``end``.
            y: middle of the line.
            words: to be written.
            style: ``word``, ``soft`` (less important), ``title``, or ``strong``.
            size: of the font.
            at: see ``x``.
        """
        width = len(words) * size * LETTER
        self._reach(x + {"start": width, "middle": width / 2, "end": 0}[at], y + size)
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        place = f'x="{_number(x)}" y="{_number(y + size * 0.35)}" font-size="{size}"'
        self._shapes.append(f'<text class="{style}" {place}{anchor}>{escape(words)}</text>')

    def caption(self, words: str) -> None:
        """A paragraph below all that is drawn so far."""
        y = self._height + 18
        for line in paragraph(words, CAPTION_CHARACTERS):
            self.text(0, y, line, "soft", size=12)
            y += 18

    def box(self, x: float, y: float, width: float, height: float, style: str, words: str = "") -> None:
        """A rounded box with words in its middle.

        Args:
            x: left edge.
            y: upper edge.
            width: of the box.
            height: of the box.
            style: see ``rank_style``; or ``blank`` (outline only), ``alarm``.
            words: in the middle, shortened by the caller.
        """
        self._reach(x + width, y + height)
        where = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self._shapes.append(f'<rect class="{style}" {where} rx="3"/>')
        if words:
            self.text(x + width / 2, y + height / 2, words, size=12, at="middle")

    def line(
        self, points: Sequence[tuple[float, float]], style: str = "edge", *, arrow: bool = False
    ) -> None:
        """A line through points, with an arrow at its end if asked for.

        Args:
            points: (x, y) of each.
            style: ``edge``, ``strong-edge`` or ``dashed``.
            arrow: whether it ends in one.
        """
        for x, y in points:
            self._reach(x, y)
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._shapes.append(f'<polyline class="{style}" points="{path}"{end}/>')

    def svg(self) -> str:
        """The whole file."""
        width, height = self._width + 2 * MARGIN, self._height + 2 * MARGIN
        size = f'width="{_number(width)}" height="{_number(height)}"'
        box = f'viewBox="{_number(-MARGIN)} {_number(-MARGIN)} {_number(width)} {_number(height)}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" aria-labelledby="title">',
                f'<title id="title">{escape(self._title)}</title>',
                f"<style>\n{_style()}\n</style>",
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                'orient="auto" markerUnits="userSpaceOnUse"><path class="head" d="M0,0.5 L8,4 L0,7.5 z"/>'
                "</marker></defs>",
                f'<rect class="page" x="{_number(-MARGIN)}" y="{_number(-MARGIN)}" {size} rx="6"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )

    def _reach(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)


def rank_style(rank: int) -> str:
    """The style of what belongs to a rank; eight colours, then the first again."""
    return f"rank{rank % len(_RANKS)}"


def short(words: str, width: float, size: int = 12) -> str:
    """The words if they fit into a width, else their beginning and two points; empty if not even those fit."""
    most = int(width / (size * LETTER))
    return words if len(words) <= most else f"{words[: most - 2]}.." if most > 2 else ""


def _number(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # never -0


def _style() -> str:
    light = {
        ".page": "fill:#ffffff;stroke:#d0d7de",
        "text": "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328",
        ".title,.strong": "font-weight:bold",
        ".soft": "fill:#59636e",
        ".blank": "fill:none;stroke:#b6bec7",
        ".alarm": "fill:#ffd0d0;stroke:#c01818;stroke-width:2.5",
        ".edge,.dashed,.strong-edge": "fill:none;stroke:#6b7580;stroke-width:1.4",
        ".strong-edge": "stroke:#1f2328;stroke-width:2.4",
        ".dashed": "stroke:#c3cad2;stroke-dasharray:4 4",
        ".head": "fill:#6b7580",
    }
    dark = {
        ".page": "fill:#0d1117;stroke:#30363d",
        "text": "fill:#e6edf3",
        ".soft": "fill:#9da7b1",
        ".blank": "stroke:#4a525b",
        ".alarm": "fill:#6b1620;stroke:#ff7b72",
        ".edge,.dashed,.strong-edge": "stroke:#9da7b1",
        ".strong-edge": "stroke:#e6edf3",
        ".dashed": "stroke:#3d454e",
        ".head": "fill:#9da7b1",
    }
    light |= {f".rank{i}": f"fill:{fill};stroke:{edge}" for i, (fill, edge, _, _) in enumerate(_RANKS)}
    dark |= {f".rank{i}": f"fill:{fill};stroke:{edge}" for i, (_, _, fill, edge) in enumerate(_RANKS)}
    rules = [f"{name}{{{look}}}" for name, look in light.items()]
    night = "\n".join(f"{name}{{{look}}}" for name, look in dark.items())
    return "\n".join([*rules, f"@media (prefers-color-scheme:dark){{\n{night}\n}}"])
