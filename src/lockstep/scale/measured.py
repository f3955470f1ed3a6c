"""What was measured of a layout, and what follows from it: pure functions of the seconds that ranks wrote down."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.scale.phases import PHASES, exchange_and_waiting, mean_phases, slowest_rank


@dataclass(frozen=True)
class Round:
    """One start of one layout."""

    seconds_per_step: float
    """Mean over the steps; of the rank that took longest."""
    samples_per_step: float
    """Mean over the steps."""
    ranks: tuple[dict[str, float], ...]
    """Mean seconds per step by phase, of each rank."""
    steps_per_epoch: int
    parameter_bytes: int
    """Of what one rank trains."""
    micro_batches: int
    """K of the recipe."""
    micro_batch_size: int

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Round:
        """Puts the files of all ranks together."""
        found: list[dict[str, Any]] = [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)
        ]
        first = found[0]
        steps = max(1, len(first["steps"]))
        return cls(
            seconds_per_step=max(each["seconds"] for each in found) / steps,
            samples_per_step=first["samples"] / steps,
            ranks=tuple(mean_phases(each["steps"]) for each in found),
            **{name: first[name] for name in _FACTS},
        )


_FACTS = ("steps_per_epoch", "parameter_bytes", "micro_batches", "micro_batch_size")


@dataclass(frozen=True)
class Spread:
    """A number measured in several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, smallest and largest."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One layout, over all rounds."""

    label: str
    strategy: str
    devices: int
    refused: str = ""
    """Why it did not run; then nothing else is filled in."""
    epoch: Spread = Spread(0.0, 0.0, 0.0)
    """Seconds that the training steps of one epoch take, evaluation and checkpoints left out."""
    step: Spread = Spread(0.0, 0.0, 0.0)
    """Seconds."""
    samples_per_second: Spread = Spread(0.0, 0.0, 0.0)
    speed_up: Spread = Spread(0.0, 0.0, 0.0)
    """Over one device, within each round."""
    efficiency: Spread = Spread(0.0, 0.0, 0.0)
    """Speed-up per device; 1 is ideal."""
    phases: dict[str, float] = field(default_factory=dict)
    """Mean seconds per step over all ranks, by phase."""
    ranks: tuple[dict[str, float], ...] = ()
    """The same of each rank."""
    communication: float = 0.0
    """Seconds per step of exchange that computing does not hide."""
    waiting: float = 0.0
    """Seconds per step that the ranks, on average, wait for the slowest."""
    slowest: int = 0
    """The rank that the others wait for."""


def row(label: str, strategy: str, devices: int, rounds: Sequence[Round], alone: Sequence[Round]) -> Row:
    """Sums up the rounds of a layout.

    Args:
        label: as in ``ddp on 4``.
        strategy: its name.
        devices: how many it takes.
        rounds: of this layout, at least one.
        alone: the same rounds of one device.
    """
    rate = [each.samples_per_step / each.seconds_per_step for each in rounds]
    base = [each.samples_per_step / each.seconds_per_step for each in alone]
    speed_up = [own / one for own, one in zip(rate, base)]
    ranks = tuple(_over_rounds([each.ranks[rank] for each in rounds]) for rank in range(len(rounds[0].ranks)))
    communication, waiting = exchange_and_waiting(ranks)
    return Row(
        label=label,
        strategy=strategy,
        devices=devices,
        epoch=Spread.of([each.seconds_per_step * each.steps_per_epoch for each in rounds]),
        step=Spread.of([each.seconds_per_step for each in rounds]),
        samples_per_second=Spread.of(rate),
        speed_up=Spread.of(speed_up),
        efficiency=Spread.of([each / devices for each in speed_up]),
        phases=mean_phases(ranks),
        ranks=ranks,
        communication=communication,
        waiting=waiting,
        slowest=slowest_rank(ranks),
    )


def _over_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over rounds."""
    found = {phase: statistics.median(each.get(phase, 0.0) for each in rounds) for phase in PHASES}
    return {phase: seconds for phase, seconds in found.items() if seconds > 0.0}
