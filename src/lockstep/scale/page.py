"""The result of ``lockstep scale`` as one self-contained HTML page, and its bar chart as SVG or PNG.

The chart shows seconds per epoch over devices: a group of bars for each number of devices, a colour for each strategy,
and a line at the top of each bar from the fastest to the slowest round. SVG and PNG are written from the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.explain.chart import (
    COLOURS,
    INK,
    PALE,
    Chart,
    Label,
    Rectangle,
    Shape,
    html_document,
    legend,
    svg,
    table,
    tick_step,
)
from lockstep.scale.measured import PHASES, Row
from lockstep.scale.prediction import Forecast, checked_table, message_table, world_table
from lockstep.scale.report import ScaleReport, layout_table, phase_table

_LEFT, _TOP, _PLOT, _BAR, _GAP = 66.0, 54.0, 250.0, 40.0, 26.0


def chart(rows: Sequence[Row], title: str) -> Chart:
    """Seconds per epoch over devices, of at least one layout that ran."""
    names = list(dict.fromkeys(_name(row) for row in rows))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    tick = tick_step(max(row.epoch.high for row in rows))
    ticks = -(-max(row.epoch.high for row in rows) // tick)
    scale, floor = _PLOT / (ticks * tick), _TOP + _PLOT
    shapes: list[Shape] = []
    x = _LEFT + _GAP
    for devices in sorted({row.devices for row in rows}):
        group = [row for row in rows if row.devices == devices]
        for place, row in enumerate(group):
            shapes += _bar(row, x + place * _BAR, floor, scale, colours[_name(row)])
        shapes.append(Label(x + len(group) * _BAR / 2, floor + 16, str(devices)))
        x += len(group) * _BAR + _GAP
    shapes.append(Label((_LEFT + x) / 2, floor + 38, "devices"))
    width = max(x + 14, _LEFT + 8.2 * len(title), 420.0)
    grid: list[Shape] = []
    for number in range(int(ticks) + 1):
        y = floor - number * tick * scale
        grid += [Rectangle(_LEFT, y, x - _LEFT, 1, PALE), Label(_LEFT - 8, y, f"{number * tick:g}", "end")]
    grid.append(Label(14, 17, title, "start", 15))
    keys, below = legend(colours, _LEFT, width, floor + 62)
    return Chart(width, below, (*grid, *shapes, *keys))


def _bar(row: Row, x: float, floor: float, scale: float, colour: str) -> list[Shape]:
    height, top = row.epoch.median * scale, floor - row.epoch.high * scale
    middle = x + _BAR / 2
    return [
        Rectangle(x + 2, floor - height, _BAR - 4, height, colour),
        Rectangle(middle - 0.75, top, 1.5, (row.epoch.high - row.epoch.low) * scale, INK),
        Label(middle, top - 9, f"{row.epoch.median:.3g}", size=11),
    ]


def _name(row: Row) -> str:
    """The layout without its number of devices."""
    return row.label.rsplit(" on ", 1)[0]


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
