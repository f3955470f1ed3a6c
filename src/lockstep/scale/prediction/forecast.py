"""Measures the exchange alone, and predicts: worlds that were measured too, to show the error, and larger ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import EXIT_DONE, RankError
from lockstep.job.config import JobConfig
from lockstep.launch.in_turn import run_in_turn
from lockstep.scale.measured import Row
from lockstep.scale.prediction.links import Interconnect
from lockstep.scale.prediction.model import WORLDS, OneDevice, Prediction, predict, predict_here

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the messages that are measured, beside the gradients' own size."""
_ENTRY = "lockstep.scale.prediction.messages:main"
_SECONDS_EACH = 0.3


@dataclass(frozen=True)
class Checked:
    """A world that was predicted and measured."""

    label: str
    devices: int
    predicted: float
    """Seconds per epoch."""
    measured: float
    """Seconds per epoch, the median."""

    @property
    def error(self) -> float:
        """How much longer the prediction is, as a part of what was measured; negative if shorter."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Forecast:
    """What is predicted, and from what."""

    one: OneDevice
    adding: float
    """Bytes per second that a device adds to others."""
    messages: dict[int, dict[int, float]]
    """Seconds of an exchange alone, by number of ranks and bytes."""
    here: tuple[Checked, ...]
    worlds: tuple[Prediction, ...]

    @property
    def note(self) -> str:
        """What the numbers stand on."""
        k = self.one.micro_batches
        return (
            f"Each device is taken to be as fast as the one measured here. Beyond {k} devices the recipe's "
            f"micro_batches = {k} do not suffice: there (*) each device computes one and the global batch grows, "
            "which is another recipe. The model: docs/scale.md."
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
        one: what one device takes.
        rows: all that was measured.
        links: what larger worlds may be connected by.
        cores: of this machine.
        folder: for what the ranks write.

    Raises:
        RankError: the measurement of the exchange did not end well.
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
        Checked(row.label, row.devices, each.epoch, row.epoch.median) for row, each in zip(compared, here)
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
    outcome = run_in_turn(_ENTRY, payload, ranks=ranks, threads=config.run.threads, folder=here)
    if outcome.code != EXIT_DONE:
        raise RankError(
            f"The exchange among {ranks} ranks was to be measured and did not end well: {' '.join(outcome.lines)}"
        )
    found = [json.loads((here / f"messages-{rank}.json").read_text()) for rank in range(ranks)]
    slowest = {int(size): max(each["seconds"][size] for each in found) for size in found[0]["seconds"]}
    return slowest, min(each["adding"] for each in found)
