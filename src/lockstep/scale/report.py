"""The result of ``lockstep scale`` for the terminal and as JSON, with one sentence on what limits scaling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lockstep.scale.measured import PHASES, Row, work
from lockstep.scale.prediction import Forecast, checked_table, message_table, world_table
from lockstep.text import aligned, plural

_COMPUTING = ("forward", "backward", "compute", "copy")
_GOOD = 0.95
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
    bounds the step; ``micro-batches`` is the cost of computing K in ceil(K / devices) rounds, and ``computing`` the
    additional time of a micro-batch compared with one device.
    """
    devices, slowest = many.devices, many.ranks[many.slowest]
    one = _sum(alone.phases, _COMPUTING)
    rounds = -(-machine.micro_batches // devices)
    expected = one * rounds / machine.micro_batches
    mean = sum(_sum(rank, _COMPUTING) for rank in many.ranks) / len(many.ranks)
    own = max(mean, expected)
    lost = {
        "data": slowest.get("data", 0.0) - alone.phases.get("data", 0.0) / devices,
        "communication": many.communication - alone.communication / devices,
        "optimizer": slowest.get("optimizer", 0.0) - alone.phases.get("optimizer", 0.0) / devices,
        "micro-batches": expected - one / devices,
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
        return f"{share}: nothing here limits scaling. Try more devices."
    part = f"{1000 * lost[cause]:.2g} ms of each step of {1000 * many.step.median:.3g} ms"
    return f"{share}: the limit is {_advice(cause, part, many, machine)}"


def _advice(cause: str, part: str, many: Row, machine: Resources) -> str:
    """The cause in words and what to change; ``part`` is the time that it takes."""
    if cause == "data":
        return (
            f"waiting for data ({part}). Raise data.workers above {machine.workers} where cores are free, or read "
            "decoded data."
        )
    if cause == "communication":
        return (
            f"communication that is not hidden by computing ({part}). Let each device compute more between two "
            'exchanges (a larger global_batch), send fewer bytes (reduce = "bf16"), or use a faster link.'
        )
    if cause == "optimizer":
        return (
            f"the optimizer, which every device runs over all parameters ({part}). Raise global_batch, use a fused "
            'optimizer, or shard the parameters (strategy "fsdp").'
        )
    if cause == "micro-batches":
        k, rounds = machine.micro_batches, -(-machine.micro_batches // many.devices)
        return (
            f"that {many.devices} devices do not divide micro_batches = {k}: some compute {rounds} while others wait "
            f"({part}). Choose micro_batches = {rounds * many.devices}, which is another recipe, or a number of "
            f"devices that divides {k}."
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
    table: list[tuple[str, ...]] = [("layout", "s/epoch", "samples/s", "speed-up", "efficiency (spread)")]
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
    occurring = [phase for phase in PHASES if any(phase in rank for row in rows for rank in row.ranks)]
    table: list[tuple[str, ...]] = [("layout", "rank", *occurring, "ms/step")]
    for row in rows:
        for rank, phases in enumerate(row.ranks):
            mark = " slowest" if rank == row.slowest and len(row.ranks) > 1 else ""
            times = (f"{1000 * phases.get(phase, 0.0):.2f}" for phase in occurring)
            table.append((row.label, f"{rank}{mark}", *times, f"{1000 * sum(phases.values()):.2f}"))
    return table


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
