"""All that ``lockstep scale`` found, for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.scale.limits import Machine
from lockstep.scale.measured import Row, Spread
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

_ABREAST = 4
"""Interconnects beside each other in the terminal, so that a line has fewer than 100 columns."""
HEAD = ("layout", "s/epoch", "samples/s", "speed-up", "efficiency (spread)")


@dataclass(frozen=True)
class Report:
    """One run of the command."""

    job: str
    steps: int
    """Measured in each round."""
    rounds: int
    rows: tuple[Row, ...]
    """One device first."""
    limit: str
    """What limits scaling, and what to change."""

    forecast: Forecast | None = None
    """Of larger worlds, if it was asked for."""
    machine: Machine | None = None
    """What it was measured on."""

    @property
    def ran(self) -> list[Row]:
        """The layouts that ran."""
        return [row for row in self.rows if not row.refused]


def as_json(report: Report) -> str:
    """All that was found; seconds throughout."""
    return json.dumps(asdict(report), indent=1) + "\n"


def cells(row: Row) -> tuple[str, ...]:
    """A layout's row under ``HEAD``."""
    if row.refused:
        return row.label, "did not run", "", "", ""
    efficiency = f"{_percent(row.efficiency.median)} ({_range(row.efficiency)})"
    rate, speed_up = row.samples_per_second.median, row.speed_up.median
    return row.label, f"{row.epoch.median:.3g}", f"{rate:.4g}", f"{speed_up:.2f}", efficiency


def phase_head(rows: Sequence[Row]) -> tuple[str, ...]:
    """The head of the table of phases: those that occur."""
    return "layout", "rank", *_occurring(rows), "ms/step"


def phase_cells(row: Row, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Where the steps of a layout go, in milliseconds: one row per rank, the slowest marked."""
    found = []
    for rank, phases in enumerate(row.ranks):
        mark = " slowest" if rank == row.slowest and len(row.ranks) > 1 else ""
        times = (f"{1000 * phases.get(phase, 0.0):.2f}" for phase in _occurring(rows))
        found.append((row.label, f"{rank}{mark}", *times, f"{1000 * sum(phases.values()):.2f}"))
    return found


def text(report: Report) -> str:
    """Tables and the sentence for the terminal."""
    lines = _aligned([HEAD, *(cells(row) for row in report.rows)])
    ran = report.ran
    lines += ["", "where a step goes (ms):"]
    lines += _aligned([phase_head(ran), *(line for row in ran for line in phase_cells(row, ran))])
    lines.append("")
    lines += [f"{row.label} did not run: {row.refused}" for row in report.rows if row.refused]
    lines.append(report.limit)
    if report.forecast is not None:
        lines += _forecast(report.forecast)
    return "\n".join(lines)


def _forecast(found: Forecast) -> list[str]:
    lines = ["", "the exchange alone (ms):"]
    lines += _aligned([message_head(found), *message_cells(found)])
    if found.here:
        lines += ["", "predicted from one device and the exchange alone, beside what was measured:"]
        lines += _aligned([HEAD_OF_HERE, *(here_cells(each) for each in found.here)])
    lines += ["", "predicted seconds per epoch (efficiency):"]
    rows = [world_head(found), *world_cells(found)]
    for first in range(1, len(rows[0]), _ABREAST):
        lines += [*_aligned([(row[0], *row[first : first + _ABREAST]) for row in rows]), ""]
    return [*lines, found.note]


def _occurring(rows: Sequence[Row]) -> list[str]:
    return [phase for phase in PHASES if any(phase in rank for row in rows for rank in row.ranks)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _range(spread: Spread) -> str:
    return f"{100 * spread.low:.0f}–{100 * spread.high:.0f}"
