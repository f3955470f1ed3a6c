"""The result of ``lockstep scale`` as one self-contained HTML page, and its bar chart as SVG or PNG.

The chart shows seconds per epoch over devices: a group of bars for each number of devices, a colour for each strategy,
and a line at the top of each bar from the fastest to the slowest round. SVG and PNG are written from the same shapes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lockstep.explain.drawing import box_element, document, text_element
from lockstep.scale.measured import PHASES, Row
from lockstep.scale.prediction import Forecast, checked_table, message_table, world_table
from lockstep.scale.report import ScaleReport, layout_table, phase_table

COLOURS = ("#2f6db5", "#b8621b", "#39803d", "#7e45a0", "#b53a4a", "#22797e", "#8a7212", "#5f5f5f")
_INK, _PALE = "#222222", "#d4d4d4"
_LEFT, _TOP, _PLOT, _BAR, _GAP = 66.0, 54.0, 250.0, 40.0, 26.0


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
class Chart:
    """Shapes on a canvas; lengths are pixels."""

    width: float
    height: float
    shapes: tuple[Rectangle | Label, ...]


def chart(rows: Sequence[Row], title: str) -> Chart:
    """Seconds per epoch over devices, of at least one layout that ran."""
    names = list(dict.fromkeys(_name(row) for row in rows))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    tick = _tick(max(row.epoch.high for row in rows))
    ticks = -(-max(row.epoch.high for row in rows) // tick)
    scale, floor = _PLOT / (ticks * tick), _TOP + _PLOT
    shapes: list[Rectangle | Label] = []
    x = _LEFT + _GAP
    for devices in sorted({row.devices for row in rows}):
        group = [row for row in rows if row.devices == devices]
        for place, row in enumerate(group):
            shapes += _bar(row, x + place * _BAR, floor, scale, colours[_name(row)])
        shapes.append(Label(x + len(group) * _BAR / 2, floor + 16, str(devices)))
        x += len(group) * _BAR + _GAP
    shapes.append(Label((_LEFT + x) / 2, floor + 38, "devices"))
    width = max(x + 14, _LEFT + 8.2 * len(title), 420.0)
    grid: list[Rectangle | Label] = []
    for number in range(int(ticks) + 1):
        y = floor - number * tick * scale
        grid += [Rectangle(_LEFT, y, x - _LEFT, 1, _PALE), Label(_LEFT - 8, y, f"{number * tick:g}", "end")]
    grid.append(Label(14, 17, title, "start", 15))
    legend, below = _legend(colours, width, floor + 62)
    return Chart(width, below, (*grid, *shapes, *legend))


def svg(picture: Chart) -> str:
    """The chart as self-contained SVG."""
    elements = [box_element(0, 0, picture.width, picture.height, 'fill="#ffffff"')]
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            look = f'fill="{shape.colour}"'
            elements.append(box_element(shape.x, shape.y, shape.width, shape.height, look))
        else:
            look = f'fill="{_INK}"'
            elements.append(text_element(shape.x, shape.y, shape.text, look, size=shape.size, at=shape.at))
    return document(picture.width, picture.height, elements, 'font-family="system-ui, sans-serif"')


def png(picture: Chart, factor: int = 2) -> bytes:
    """The chart as PNG, ``factor`` pixels for each of the chart's."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (round(picture.width * factor), round(picture.height * factor)), "white")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
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


def _bar(row: Row, x: float, floor: float, scale: float, colour: str) -> list[Rectangle | Label]:
    height, top = row.epoch.median * scale, floor - row.epoch.high * scale
    middle = x + _BAR / 2
    return [
        Rectangle(x + 2, floor - height, _BAR - 4, height, colour),
        Rectangle(middle - 0.75, top, 1.5, (row.epoch.high - row.epoch.low) * scale, _INK),
        Label(middle, top - 9, f"{row.epoch.median:.3g}", size=11),
    ]


def _legend(colours: dict[str, str], width: float, y: float) -> tuple[list[Rectangle | Label], float]:
    """The legend of colours, in as many lines as needed, and the height below it."""
    shapes: list[Rectangle | Label] = []
    x = _LEFT
    for name, colour in colours.items():
        needed = 34 + 7.4 * len(name)
        if x > _LEFT and x + needed > width:
            x, y = _LEFT, y + 20
        shapes += [Rectangle(x, y - 5, 10, 10, colour), Label(x + 16, y, name, "start")]
        x += needed
    return shapes, y + 20


def _name(row: Row) -> str:
    """The layout without its number of devices."""
    return row.label.rsplit(" on ", 1)[0]


def _tick(most: float) -> float:
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
.steps { display: grid; grid-template-columns: max-content 1fr; gap: .25em .8em; align-items: center }
.bar { display: flex; height: 1.1em } .key { margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""


def page(report: ScaleReport) -> str:
    """The page: the sentence, the chart, tables, and a bar for the steps of every rank."""
    ran = report.ran
    what = f"{report.job}: how training scales"
    parts = [
        f"<h1>{escape(what)}</h1>",
        f"<p>{report.steps} steps of each layout in {report.rounds} alternating rounds.</p>",
        f'<p class="limit">{escape(report.limit)}</p>',
        f'<figure class="scroll">{svg(chart(ran, "Seconds per epoch over devices"))}</figure>',
        "<h2>Layouts</h2>",
        table(layout_table(report.rows)),
        *(
            f"<p>{escape(f'{row.label} did not run: {row.refused}')}</p>"
            for row in report.rows
            if row.refused
        ),
        "<h2>Where a step goes</h2>",
        _steps(ran),
        "<h2>The same in milliseconds</h2>",
        table(phase_table(ran)),
    ]
    if report.forecast is not None:
        parts += _forecast(report.forecast)
    return html_document(what, parts)


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


def _forecast(found: Forecast) -> list[str]:
    parts = ["<h2>Prediction: seconds per epoch (efficiency)</h2>"]
    parts += [table(world_table(found)), f"<p>{escape(found.note)}</p>"]
    if found.here:
        parts += ["<h2>Predicted and measured</h2>", table(checked_table(found))]
    return [*parts, "<h2>The exchange alone, in milliseconds</h2>", table(message_table(found))]


def _steps(rows: Sequence[Row]) -> str:
    """A bar for each rank, its parts as wide as their share of the longest step."""
    colours = dict(zip(PHASES, COLOURS))
    longest = max(sum(phases.values()) for row in rows for phases in row.ranks)
    found = [phase for phase in PHASES if any(phase in rank for row in rows for rank in row.ranks)]
    keys = "".join(
        f'<span class="key"><i style="background:{colours[name]}"></i>{name}</span>' for name in found
    )
    lines = []
    for row in rows:
        for rank, phases in enumerate(row.ranks):
            slowest = " (slowest)" if rank == row.slowest and len(row.ranks) > 1 else ""
            parts = "".join(
                f'<span title="{name} {1000 * seconds:.2f} ms" '
                f'style="width:{100 * seconds / longest:.2f}%;background:{colours[name]}"></span>'
                for name, seconds in phases.items()
            )
            label = escape(f"{row.label}, rank {rank}{slowest}")
            lines.append(f'<span>{label}</span><span class="bar">{parts}</span>')
    return f'<p>{keys}</p><div class="steps">{"".join(lines)}</div>'
