"""The bar chart of seconds per epoch over devices: pure geometry, then SVG or PNG from the same shapes.

Bars stand in groups, one group for each number of devices and one colour for each strategy; a line at each bar's top
spans the slowest and the fastest round.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lockstep.scale.measured import Row

COLOURS = ("#2f6db5", "#b8621b", "#39803d", "#7e45a0", "#b53a4a", "#22797e", "#8a7212", "#5f5f5f")
_INK, _PALE = "#222222", "#d4d4d4"
_LEFT, _TOP, _PLOT, _BAR, _GAP = 66.0, 54.0, 250.0, 40.0, 26.0


@dataclass(frozen=True)
class Box:
    """A filled rectangle; lengths are pixels from the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Words:
    """Text whose middle has height ``y``; ``at`` says whether ``x`` is its start, middle or end."""

    x: float
    y: float
    text: str
    at: str = "middle"
    size: int = 12


@dataclass(frozen=True)
class Chart:
    """A picture."""

    width: float
    height: float
    shapes: tuple[Box | Words, ...]


def chart(rows: Sequence[Row], title: str) -> Chart:
    """Seconds per epoch over devices.

    Args:
        rows: layouts that ran, at least one.
        title: stands above.
    """
    names = list(dict.fromkeys(_name(row) for row in rows))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    tick = _tick(max(row.epoch.high for row in rows))
    ticks = -(-max(row.epoch.high for row in rows) // tick)
    scale, floor = _PLOT / (ticks * tick), _TOP + _PLOT
    shapes: list[Box | Words] = []
    x = _LEFT + _GAP
    for devices in sorted({row.devices for row in rows}):
        group = [row for row in rows if row.devices == devices]
        for place, row in enumerate(group):
            shapes += _bar(row, x + place * _BAR, floor, scale, colours[_name(row)])
        shapes.append(Words(x + len(group) * _BAR / 2, floor + 16, str(devices)))
        x += len(group) * _BAR + _GAP
    shapes.append(Words((_LEFT + x) / 2, floor + 38, "devices"))
    width = max(x + 14, _LEFT + 8.2 * len(title), 420.0)
    grid: list[Box | Words] = []
    for number in range(int(ticks) + 1):
        y = floor - number * tick * scale
        grid += [Box(_LEFT, y, x - _LEFT, 1, _PALE), Words(_LEFT - 8, y, f"{number * tick:g}", "end")]
    grid.append(Words(14, 17, title, "start", 15))
    legend, below = _legend(colours, width, floor + 62)
    return Chart(width, below, (*grid, *shapes, *legend))


def svg(picture: Chart) -> str:
    """The picture as SVG that needs nothing but itself."""
    size = f'width="{picture.width:.0f}" height="{picture.height:.0f}"'
    box = f'viewBox="0 0 {picture.width:.0f} {picture.height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="system-ui, sans-serif" role="img">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for shape in picture.shapes:
        if isinstance(shape, Box):
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}"'
            lines.append(f'<rect {place} height="{shape.height:.1f}" fill="{shape.colour}"/>')
        else:
            place = f'x="{shape.x:.1f}" y="{shape.y + 0.35 * shape.size:.1f}" font-size="{shape.size}"'
            words = escape(shape.text)
            lines.append(f'<text {place} text-anchor="{shape.at}" fill="{_INK}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def png(picture: Chart, factor: int = 2) -> bytes:
    """The picture as PNG, ``factor`` pixels to each of its own."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (round(picture.width * factor), round(picture.height * factor)), "white")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            right, bottom = shape.x + max(shape.width, 1), shape.y + max(shape.height, 1)
            corners = [shape.x * factor, shape.y * factor, right * factor - 1, bottom * factor - 1]
            draw.rectangle(corners, fill=shape.colour)
        else:
            font = ImageFont.load_default(shape.size * factor)
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.at]
            place = (shape.x * factor, shape.y * factor)
            draw.text(place, shape.text, fill=_INK, font=font, anchor=anchor)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _bar(row: Row, x: float, floor: float, scale: float, colour: str) -> list[Box | Words]:
    height, top = row.epoch.median * scale, floor - row.epoch.high * scale
    middle = x + _BAR / 2
    return [
        Box(x + 2, floor - height, _BAR - 4, height, colour),
        Box(middle - 0.75, top, 1.5, (row.epoch.high - row.epoch.low) * scale, _INK),
        Words(middle, top - 9, f"{row.epoch.median:.3g}", size=11),
    ]


def _legend(colours: dict[str, str], width: float, y: float) -> tuple[list[Box | Words], float]:
    """Colours and what they stand for, in as many lines as they take; and the height below them."""
    shapes: list[Box | Words] = []
    x = _LEFT
    for name, colour in colours.items():
        needed = 34 + 7.4 * len(name)
        if x > _LEFT and x + needed > width:
            x, y = _LEFT, y + 20
        shapes += [Box(x, y - 5, 10, 10, colour), Words(x + 16, y, name, "start")]
        x += needed
    return shapes, y + 20


def _name(row: Row) -> str:
    """The layout without its number of devices."""
    return row.label.rsplit(" on ", 1)[0]


def _tick(most: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten of which at most six reach ``most``."""
    unit = 10.0 ** math.floor(math.log10(most / 6))
    return next(unit * step for step in (1, 2, 5, 10) if most / (unit * step) <= 6)
