"""The result of ``lockstep scale``, with one sentence on what limits scaling: as text, JSON, an HTML page and a chart.

The chart shows seconds per epoch over devices: a group of bars for each number of devices, a colour for each strategy,
and a line at the top of each bar from the fastest to the slowest round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from lockstep.scale.measured import PHASES, Row, computing_ranks, work
from lockstep.scale.prediction import Forecast, checked_table, message_table, world_table
from lockstep.text import aligned, plural

_COMPUTING = ("forward", "backward", "compute", "copy")
_GOOD = 0.95
_MUCH_WAITING = 0.2
_ABREAST = 4
"""Interconnects in a table of the terminal, which keeps lines below 100 columns."""


@dataclass(frozen=True)
class Resources:
    """Processors and processes that the layouts ran with."""

    cores: int
    """Processors that this process may use."""
    threads: int
    """Of each rank."""
    workers: int
    """Loader processes of each rank."""
    micro_batches: int
    """K of the recipe."""


def lost_seconds(alone: Row, many: Row, machine: Resources) -> dict[str, float]:
    """Seconds per step that keep a layout from an ideal speed-up, by cause. Never negative.

    The ideal step takes ``alone / devices``. Data, computing and optimizer are judged by the slowest rank, whose work
    bounds the step; ``servers`` is the cost of devices that do not compute, ``micro-batches`` that of computing K in
    ceil(K / computing devices) rounds, and ``computing`` the additional time of a micro-batch compared with one device.
    """
    devices, slowest = many.devices, many.ranks[many.slowest]
    one = _sum(alone.phases, _COMPUTING)
    rounds = -(-machine.micro_batches // many.computing)
    expected = one * rounds / machine.micro_batches
    mean = statistics.fmean(_sum(many.ranks[rank], _COMPUTING) for rank in computing_ranks(many.ranks))
    own = max(mean, expected)
    lost = {
        "data": slowest.get("data", 0.0) - alone.phases.get("data", 0.0) / devices,
        "communication": many.communication - alone.communication / devices,
        "optimizer": slowest.get("optimizer", 0.0) - alone.phases.get("optimizer", 0.0) / devices,
        "between steps": slowest.get("other", 0.0) - alone.phases.get("other", 0.0) / devices,
        "servers": one / many.computing - one / devices,
        "micro-batches": expected - one / many.computing,
        "imbalance": max(0.0, _sum(slowest, _COMPUTING) - own),
        "computing": own - expected,
    }
    return {cause: max(0.0, seconds) for cause, seconds in lost.items()}


def sentence(alone: Row, many: Row, machine: Resources) -> str:
    """Names what limits the layout ``many``, compared with one device, and what to change."""
    share = f"{many.label} reaches {100 * many.efficiency.median:.0f} % of an ideal speed-up"
    busy = many.devices * machine.threads
    if busy > machine.cores:
        most = max(1, machine.cores // machine.threads)
        return (
            f"{share}: too few cores, since {many.devices} devices with {plural(machine.threads, 'thread')} each "
            f"need {busy} and there are {machine.cores}. Use at most {plural(most, 'device')} here, or more cores."
        )
    lost = lost_seconds(alone, many, machine)
    cause = max(lost, key=lambda name: lost[name])
    if many.efficiency.median >= _GOOD or lost[cause] <= 0.0:
        return f"{share}: nothing here limits scaling. Try more devices.{_waiting(many, machine)}"
    part = f"{1000 * lost[cause]:.2g} ms of each step of {1000 * many.step.median:.3g} ms"
    more = "" if cause == "data" else _waiting(many, machine)
    return f"{share}: the limit is {_advice(cause, part, many, machine)}{more}"


def _waiting(many: Row, machine: Resources) -> str:
    """The sentence on the time in which the slowest rank waits for data, where that is much, though it scales."""
    waits = many.ranks[many.slowest].get("data", 0.0) / many.step.median
    if waits < _MUCH_WAITING:
        return ""
    return (
        f" However many devices there are, it waits for data for {100 * waits:.0f} % of a step: raise data.workers "
        f"above {machine.workers} where cores are free, or read decoded data."
    )


_ADVICE = {
    "data": (
        "waiting for data ({part}). Raise data.workers above {workers} where cores are free, or read decoded data."
    ),
    "communication": (
        "communication that is not hidden by computing ({part}). Let each device compute more between two exchanges "
        '(a larger global_batch), send fewer bytes (reduce = "bf16"), or use a faster link.'
    ),
    "optimizer": (
        "the optimizer, which every device runs over all parameters ({part}). Raise global_batch, use a fused "
        'optimizer, or shard the parameters (strategy "fsdp").'
    ),
    "between steps": (
        "what is done between steps ({part}): replicas are compared, and the first steps of epochs rehearsed. That is "
        'less in longer epochs, with a larger training.fingerprint_every or checks = "off".'
    ),
}
"""The sentences on causes of lost time, where they need no more than the time and the number of workers."""


def _advice(cause: str, part: str, many: Row, machine: Resources) -> str:
    """The cause in words and what to change; ``part`` is the time that it takes."""
    if cause in _ADVICE:
        return _ADVICE[cause].format(part=part, workers=machine.workers)
    if cause == "servers":
        return (
            f"that {many.devices - many.computing} of {many.devices} devices hold the parameters and compute nothing "
            f'({part}). Use more workers for each server, or strategy "ddp", in which every device computes.'
        )
    if cause == "micro-batches":
        k, rounds = machine.micro_batches, -(-machine.micro_batches // many.computing)
        return (
            f"that {many.computing} devices do not divide micro_batches = {k}: some compute {rounds} while others wait "
            f"({part}). Choose a number of devices that divides {k}, or micro_batches = {rounds * many.computing} "
            "and a global_batch that it divides, which is another recipe."
        )
    if cause == "imbalance":
        return (
            f"rank {many.slowest}, for which the others wait ({part}): it is busy for "
            f"{1000 * work(many.ranks[many.slowest]):.3g} ms of a step. Check what else runs on its device, and "
            "whether its samples or layers are larger."
        )
    needed = many.devices * (machine.threads + machine.workers)
    if needed > machine.cores:
        return (
            f"too few cores: with data.workers = {machine.workers}, {many.devices} devices need {needed} and there "
            f"are {machine.cores}, so computing takes longer than on one device ({part}). Lower data.workers."
        )
    return (
        f"computing itself, which takes longer than on one device ({part}): devices share memory bandwidth, caches or "
        "clock, or exchange within forward and backward. Use separate devices, or a strategy that exchanges less."
    )


def _sum(phases: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(phases.get(name, 0.0) for name in names)


@dataclass(frozen=True)
class ScaleReport:
    """The result of one run of the command."""

    job: str
    steps: int
    """Measured in each round."""
    rounds: int
    rows: tuple[Row, ...]
    """One device first."""
    limit: str
    """Sentence on what limits scaling and what to change."""
    forecast: Forecast | None = None
    """Of larger worlds, with --predict."""
    machine: Resources | None = None
    """The machine it was measured on."""

    @property
    def ran(self) -> list[Row]:
        """The layouts that ran."""
        return [row for row in self.rows if not row.refused]


def as_json(report: ScaleReport) -> str:
    """All results; times are in seconds."""
    return json.dumps(asdict(report), indent=1) + "\n"


def layout_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A head, and a row for each layout."""
    table: list[tuple[str, ...]] = [("layout", "s/epoch", "samples/s", "speed-up in a round", "efficiency (spread)")]
    for row in rows:
        if row.refused:
            table.append((row.label, "did not run", "", "", ""))
            continue
        share, rate = row.efficiency, row.samples_per_second.median
        efficiency = f"{100 * share.median:.0f} % ({100 * share.low:.0f}–{100 * share.high:.0f})"
        speed_up = f"{row.speed_up.median:.2f}"
        table.append((row.label, f"{row.epoch.median:.3g}", f"{rate:.4g}", speed_up, efficiency))
    return table


def phase_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A head, and a row for each rank: milliseconds of each phase that occurs; the slowest rank is marked."""
    occurring = _occurring(rows)
    table: list[tuple[str, ...]] = [("layout", "rank", *occurring, "ms/step")]
    for row in rows:
        for rank, phases in enumerate(row.ranks):
            mark = " slowest" if rank == row.slowest and len(row.ranks) > 1 else ""
            times = (f"{1000 * phases.get(phase, 0.0):.2f}" for phase in occurring)
            table.append((row.label, f"{rank}{mark}", *times, f"{1000 * sum(phases.values()):.2f}"))
    return table


def _occurring(rows: Sequence[Row]) -> list[str]:
    return [phase for phase in PHASES if any(phase in rank for row in rows for rank in row.ranks)]


def text(report: ScaleReport) -> str:
    """Tables and the sentence for the terminal."""
    lines = [*aligned(layout_table(report.rows)), "", "where a step goes (ms):"]
    lines += [*aligned(phase_table(report.ran)), ""]
    lines += [f"{row.label} did not run: {row.refused}" for row in report.rows if row.refused]
    lines.append(report.limit)
    if report.forecast is not None:
        lines += _forecast(report.forecast)
    return "\n".join(lines)


def _forecast(found: Forecast) -> list[str]:
    lines = ["", "the exchange alone (ms):", *aligned(message_table(found))]
    if found.here:
        lines += ["", "predicted from one device and the exchange alone, and measured:"]
        lines += aligned(checked_table(found))
    lines += ["", "predicted seconds per epoch (efficiency):"]
    rows = world_table(found)
    for first in range(1, len(rows[0]), _ABREAST):
        lines += [*aligned([(row[0], *row[first : first + _ABREAST]) for row in rows]), ""]
    return [*lines, found.note]


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
        *(f"<p>{escape(f'{row.label} did not run: {row.refused}')}</p>" for row in report.rows if row.refused),
        "<h2>Where a step goes</h2>",
        _steps(ran),
        "<h2>The same in milliseconds</h2>",
        table(phase_table(ran)),
    ]
    if (found := report.forecast) is not None:
        parts.append("<h2>Prediction: seconds per epoch (efficiency)</h2>")
        parts += [table(world_table(found)), f"<p>{escape(found.note)}</p>"]
        if found.here:
            parts += ["<h2>Predicted and measured</h2>", table(checked_table(found))]
        parts += ["<h2>The exchange alone, in milliseconds</h2>", table(message_table(found))]
    return html_document(what, parts)


def _steps(rows: Sequence[Row]) -> str:
    """A bar for each rank, its parts as wide as their share of the longest step."""
    colours = dict(zip(PHASES, COLOURS))
    longest = max(sum(phases.values()) for row in rows for phases in row.ranks)
    keys = [f'<span class="key"><i style="background:{colours[name]}"></i>{name}</span>' for name in _occurring(rows)]
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
    return f'<p>{"".join(keys)}</p><div class="steps">{"".join(lines)}</div>'
