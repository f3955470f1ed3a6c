"""Measures the exchange of gradients alone and predicts worlds: measured ones, to show the error, and larger ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.job import JobConfig
from lockstep.errors import EXIT_DONE, RankError
from lockstep.launch.supervisor import run_sequentially
from lockstep.scale.measured import Row
from lockstep.scale.prediction import WORLDS, Interconnect, OneDevice, Prediction, predict, predict_here

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the measured messages; the size of the gradients is added."""
_ENTRY = "lockstep.scale.rank:time_exchange"
_SECONDS_EACH = 0.3


@dataclass(frozen=True)
class CheckedPrediction:
    """A world that was predicted and measured."""

    label: str
    devices: int
    predicted: float
    """Seconds per epoch."""
    measured: float
    """Seconds per epoch, the median."""

    @property
    def error(self) -> float:
        """The relative error of the prediction; negative where it is too short."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Forecast:
    """Predictions and the measurements behind them."""

    one: OneDevice
    adding: float
    """Bytes per second that a device adds up."""
    messages: dict[int, dict[int, float]]
    """Seconds of an exchange alone, by number of ranks and bytes."""
    here: tuple[CheckedPrediction, ...]
    worlds: tuple[Prediction, ...]

    @property
    def note(self) -> str:
        """The assumptions of the predictions."""
        k = self.one.micro_batches
        return (
            f"Every device is assumed to be as fast as the one measured here. Beyond {k} devices, micro_batches = {k} "
            "is too small for the world: there (*) each device computes one micro-batch and the global batch grows, "
            "which is another recipe. The model is described in docs/scale.md."
        )


def forecast(
    config: JobConfig,
    one: OneDevice,
    rows: Sequence[Row],
    links: Sequence[Interconnect],
    cores: int,
    folder: Path,
) -> Forecast:
    """Measures the exchange among as many ranks as ``ddp`` was measured on (or 2), and predicts.

    Args:
        config: the job.
        one: times of one device.
        rows: all measured layouts.
        links: interconnects of larger worlds.
        cores: of this machine.
        folder: for the files of the ranks.

    Raises:
        RankError: the measurement of the exchange failed.
    """
    compared = [row for row in rows if row.strategy == "ddp" and not row.refused]
    messages, adding = {}, 0.0
    for ranks in [row.devices for row in compared] or [2]:
        messages[ranks], adding = _measure(config, one, ranks, folder)
    here = [
        predict_here(one, row.devices, messages[row.devices], row.devices * config.run.threads / cores)
        for row in compared
    ]
    checked = (
        CheckedPrediction(row.label, row.devices, each.epoch, row.epoch.median)
        for row, each in zip(compared, here)
    )
    worlds = (predict(one, devices, link, adding) for link in links for devices in WORLDS)
    return Forecast(one, adding, messages, tuple(checked), tuple(worlds))


def _measure(config: JobConfig, one: OneDevice, ranks: int, folder: Path) -> tuple[dict[int, float], float]:
    """Seconds by bytes, of the slowest rank, and bytes added per second."""
    here = folder / f"messages-{ranks}"
    here.mkdir()
    payload = {
        "reduce": one.reduce,
        "micro_batches": one.micro_batches,
        "sizes": sorted({*SIZES, max(4, one.gradient_bytes)}),
        "seconds": _SECONDS_EACH,
        "threads": config.run.threads,
        "timeout": config.run.timeout,
    }
    outcome = run_sequentially(_ENTRY, payload, ranks=ranks, threads=config.run.threads, folder=here)
    if outcome.code != EXIT_DONE:
        raise RankError(f"Measuring the exchange among {ranks} ranks failed: {' '.join(outcome.lines)}")
    found = [json.loads((here / f"messages-{rank}.json").read_text()) for rank in range(ranks)]
    slowest = {int(size): max(each["seconds"][size] for each in found) for size in found[0]["seconds"]}
    return slowest, min(each["adding"] for each in found)


def checked_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head, and a row for each world that was measured too."""
    return [
        ("layout", "predicted s/epoch", "measured s/epoch", "error"),
        *(
            (each.label, f"{each.predicted:.3g}", f"{each.measured:.3g}", f"{100 * each.error:+.0f} %")
            for each in found.here
        ),
    ]


def world_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head of interconnects, and a row for each number of devices; ``*`` where it needs another recipe."""
    rows: dict[str, list[str]] = {}
    for each in found.worlds:
        name = f"{each.devices}{'' if each.same_recipe else ' *'}"
        rows.setdefault(name, []).append(f"{each.epoch:.3g} ({100 * each.efficiency:.0f} %)")
    interconnects = dict.fromkeys(each.interconnect for each in found.worlds)
    return [("devices", *interconnects), *((name, *cells) for name, cells in rows.items())]


def message_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head of numbers of ranks, and a row for each size, in milliseconds."""
    each = list(found.messages.values())
    rows = ((f"{size:,}", *(f"{1000 * seconds[size]:.3g}" for seconds in each)) for size in each[0])
    return [("bytes", *(f"{ranks} ranks" for ranks in found.messages)), *rows]
