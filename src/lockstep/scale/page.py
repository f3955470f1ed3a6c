"""The result as one HTML page that needs nothing but itself: no script, no font, no address."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.scale.chart import COLOURS, chart, svg
from lockstep.scale.measured import Row
from lockstep.scale.phases import PHASES
from lockstep.scale.prediction.forecast import Forecast
from lockstep.scale.prediction.words import (
    HEAD_OF_HERE,
    here_cells,
    message_cells,
    message_head,
    world_cells,
    world_head,
)
from lockstep.scale.report import HEAD, Report, cells, phase_cells, phase_head

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


def page(report: Report) -> str:
    """All of it: the sentence, chart, tables, and a bar for the steps of every rank."""
    ran = report.ran
    what = f"{report.job}: how training scales"
    parts = [
        f"<h1>{escape(what)}</h1>",
        f"<p>{report.steps} steps of each layout in {report.rounds} alternating rounds.</p>",
        f'<p class="limit">{escape(report.limit)}</p>',
        f'<figure class="scroll">{svg(chart(ran, "Seconds per epoch over devices"))}</figure>',
        "<h2>Layouts</h2>",
        table([HEAD, *(cells(row) for row in report.rows)]),
        *(
            f"<p>{escape(f'{row.label} did not run: {row.refused}')}</p>"
            for row in report.rows
            if row.refused
        ),
        "<h2>Where a step goes</h2>",
        _steps(ran),
        "<h2>The same in milliseconds</h2>",
        table([phase_head(ran), *(line for row in ran for line in phase_cells(row, ran))]),
    ]
    if report.forecast is not None:
        parts += _forecast(report.forecast)
    return document(what, parts)


def document(title: str, parts: Sequence[str]) -> str:
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
    parts += [table([world_head(found), *world_cells(found)]), f"<p>{escape(found.note)}</p>"]
    if found.here:
        parts += ["<h2>The prediction beside what was measured</h2>"]
        parts += [table([HEAD_OF_HERE, *(here_cells(each) for each in found.here)])]
    parts += ["<h2>The exchange alone, in milliseconds</h2>"]
    return [*parts, table([message_head(found), *message_cells(found)])]


def _steps(rows: Sequence[Row]) -> str:
    """A bar for each rank, its parts as wide as the time they take of the longest step."""
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
