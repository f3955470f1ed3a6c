"""Charts as SVG and PNG from the same shapes, and pages of HTML around them.

Everything is self-contained: no script, font or address.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lockstep.explain.drawing import box_element, document, line_element, text_element

COLOURS = ("#2f6db5", "#b8621b", "#39803d", "#7e45a0", "#b53a4a", "#22797e", "#8a7212", "#5f5f5f")
INK, PALE = "#222222", "#d4d4d4"


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle; lengths are pixels from the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Label:
    """Text whose middle has height ``y``; ``at`` says whether ``x`` is its start, middle or end."""

    x: float
    y: float
    text: str
    at: str = "middle"
    size: int = 12


@dataclass(frozen=True)
class Curve:
    """A line through points, each (x, y)."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.6


Shape = Rectangle | Label | Curve


@dataclass(frozen=True)
class Chart:
    """Shapes on a canvas; lengths are pixels."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def svg(picture: Chart) -> str:
    """The chart as self-contained SVG."""
    elements = [box_element(0, 0, picture.width, picture.height, 'fill="#ffffff"')]
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            look = f'fill="{shape.colour}"'
            elements.append(box_element(shape.x, shape.y, shape.width, shape.height, look))
        elif isinstance(shape, Curve):
            look = f'fill="none" stroke="{shape.colour}" stroke-width="{shape.width}" stroke-linejoin="round"'
            elements.append(line_element(shape.points, look))
        else:
            look = f'fill="{INK}"'
            elements.append(text_element(shape.x, shape.y, shape.text, look, size=shape.size, at=shape.at))
    return document(picture.width, picture.height, elements, 'font-family="system-ui, sans-serif"')


def png(picture: Chart) -> bytes:
    """The chart as PNG, two pixels for each of the chart's."""
    from PIL import Image, ImageDraw, ImageFont

    fine = 4  # Pillow draws lines without smoothing: drawn twice as large, and reduced
    image = Image.new("RGB", (round(picture.width * fine), round(picture.height * fine)), "white")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            right, bottom = shape.x + max(shape.width, 1), shape.y + max(shape.height, 1)
            corners = [shape.x * fine, shape.y * fine, right * fine - 1, bottom * fine - 1]
            draw.rectangle(corners, fill=shape.colour)
        elif isinstance(shape, Curve):
            points = [(x * fine, y * fine) for x, y in shape.points]
            draw.line(points, fill=shape.colour, width=round(shape.width * fine), joint="curve")
        else:
            font = ImageFont.load_default(shape.size * fine)
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.at]
            place = (shape.x * fine, shape.y * fine)
            draw.text(place, shape.text, fill=INK, font=font, anchor=anchor)
    data = io.BytesIO()
    image.reduce(2).save(data, "PNG")
    return data.getvalue()


def legend(colours: Mapping[str, str], left: float, width: float, y: float) -> tuple[list[Shape], float]:
    """The legend of colours, in as many lines as needed, and the height below it."""
    shapes: list[Shape] = []
    x = left
    for name, colour in colours.items():
        needed = 34 + 7.4 * len(name)
        if x > left and x + needed > width:
            x, y = left, y + 20
        shapes += [Rectangle(x, y - 5, 10, 10, colour), Label(x + 16, y, name, "start")]
        x += needed
    return shapes, y + 20


def tick_step(most: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten of which at most six reach ``most``."""
    unit = 10.0 ** math.floor(math.log10(most / 6))
    return next(unit * step for step in (1, 2, 5, 10) if most / (unit * step) <= 6)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72em;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
.limit { border-left: 4px solid #b8621b; background: #fdf3ea; padding: .7em 1em }
table { border-collapse: collapse } td, th { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap }
td:first-child, th:first-child { text-align: left } .scroll { overflow-x: auto } figure { margin: 0 }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(11em, 1fr)); gap: 1em }
.samples p { margin: .3em 0; font-size: .85em; overflow-wrap: anywhere } .samples img { image-rendering: pixelated }
pre { overflow-x: auto; background: #f5f5f5; padding: .7em 1em } code { overflow-wrap: anywhere }
.steps { display: grid; grid-template-columns: max-content 1fr; gap: .25em .8em; align-items: center }
.bar { display: flex; height: 1.1em } .key { margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""


def html_document(title: str, parts: Sequence[str]) -> str:
    """A page from parts of HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    lines = [
        "".join(f"<{cell}>{escape(words)}</{cell}>" for words in row)
        for cell, row in zip(["th"] + ["td"] * len(rows), rows)
    ]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"
