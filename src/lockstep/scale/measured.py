"""Measures the layouts of a job: seconds of each phase of a step, rounds of all layouts, and their speed-up.

PhaseClock   in a rank: seconds of each phase, from the moments at which phases change
Round        the files of all ranks of one start of one layout
row          speed-up, efficiency and phases of a layout, from its rounds
Rounds       runs the layouts in alternation, so that a slow moment of the machine affects all of them alike
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.job import JobConfig
from lockstep.errors import ConfigError
from lockstep.verify.layouts import REFERENCE, Layout, run_layout

PHASES = ("data", "copy", "forward", "backward", "compute", "exchange", "optimizer", "other")
"""``data``: waiting for the loader. ``copy``: inputs to the device. ``compute``: forward and backward where they cannot
be told apart, as in replicas on threads. ``exchange``: from this rank's last backward until the gradients are there:
communication that is not hidden, and waiting for slower ranks. ``other``: saving, comparing fingerprints."""

OF_MARKS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "compute": "compute",
    "reduce": "exchange",
    "update": "optimizer",
}
"""The phase that begins when a rank marks its heartbeat so; any other mark begins ``other``."""


class PhaseClock:
    """Adds up the seconds of each phase, step by step. Has no clock of its own: every call takes the time.

    Args:
        now: seconds, when the first step begins; it begins by waiting for data.
    """

    def __init__(self, now: float) -> None:
        self.steps: list[dict[str, float]] = []
        """Seconds by phase, of each finished step; phases that did not occur are absent."""
        self._since, self._phase = now, "data"
        self._current: dict[str, float] = {}

    def enter(self, mark: str, now: float) -> None:
        """Ends the current phase and begins the one of a heartbeat's mark."""
        self._add(self._phase, now - self._since)
        self._since, self._phase = now, OF_MARKS.get(mark, "other")

    def copied(self, seconds: float) -> None:
        """Counts ``seconds`` of the current phase as copying inputs to the device."""
        self._add("copy", seconds)
        self._add(self._phase, -seconds)

    def end_step(self, now: float) -> None:
        """Ends a step; the time until the next mark is ``other`` of the next step."""
        self.enter("over", now)
        self.steps.append(self._current)
        self._current = {}

    def _add(self, phase: str, seconds: float) -> None:
        self._current[phase] = self._current.get(phase, 0.0) + seconds


def mean_phases(
    found: Sequence[Mapping[str, float]], mean: Callable[[Sequence[float]], float] = statistics.fmean
) -> dict[str, float]:
    """Mean seconds of each phase, in the order of ``PHASES``; phases that never occur are left out."""
    means = {phase: mean([each.get(phase, 0.0) for each in found]) for phase in PHASES}
    return {phase: seconds for phase, seconds in means.items() if seconds > 0.0}


def work(phases: Mapping[str, float]) -> float:
    """Seconds per step that a rank is busy itself: all but ``exchange``, in which ranks wait for each other."""
    return sum(seconds for phase, seconds in phases.items() if phase != "exchange")


def computing_ranks(ranks: Sequence[Mapping[str, float]]) -> list[int]:
    """The ranks that compute micro-batches, as parameter servers do not; all, where phases are not told apart."""
    found = [rank for rank, phases in enumerate(ranks) if phases.get("forward", 0.0) > 0.0]
    return found or list(range(len(ranks)))


def slowest_rank(ranks: Sequence[Mapping[str, float]]) -> int:
    """The rank that the others wait for: the first of those with the most work, among those that compute."""
    return max(computing_ranks(ranks), key=lambda rank: (work(ranks[rank]), -rank))


def exchange_and_waiting(ranks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Splits the mean ``exchange`` of a step into (communication, waiting for the slowest rank), in seconds.

    The rank that comes last does not wait, so the shortest exchange of a rank is communication alone.
    """
    each = [phases.get("exchange", 0.0) for phases in ranks]
    return min(each), sum(each) / len(each) - min(each)


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
    samples_per_epoch: int
    parameter_bytes: int
    """Of what one rank trains."""
    micro_batches: int
    """K of the recipe."""
    micro_batch_size: int

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Round:
        """Reads the files of all ranks."""
        found: list[dict[str, Any]] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        first = found[0]
        steps = max(1, len(first["steps"]))
        return cls(
            seconds_per_step=max(each["seconds"] for each in found) / steps,
            samples_per_step=first["samples"] / steps,
            ranks=tuple(mean_phases(each["steps"]) for each in found),
            steps_per_epoch=first["steps_per_epoch"],
            samples_per_epoch=first["samples_per_epoch"],
            parameter_bytes=first["parameter_bytes"],
            micro_batches=first["micro_batches"],
            micro_batch_size=first["micro_batch_size"],
        )


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
    """The reason why it did not run; all else is then empty."""
    epoch: Spread = Spread(0.0, 0.0, 0.0)
    """Seconds of the training steps of one epoch, without evaluation and checkpoints."""
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
    """Seconds per step of exchange that is not hidden by computing."""
    waiting: float = 0.0
    """Seconds per step that the ranks that compute, on average, wait for the slowest."""
    slowest: int = 0
    """The rank that the others wait for."""

    @property
    def computing(self) -> int:
        """Devices that compute: all but those of parameter servers."""
        return self.devices - len(self.ranks) + len(computing_ranks(self.ranks))


def row(label: str, strategy: str, devices: int, rounds: Sequence[Round], alone: Sequence[Round]) -> Row:
    """Sums up the rounds of a layout, at least one; ``alone`` are the same rounds of one device."""
    rate = [each.samples_per_step / each.seconds_per_step for each in rounds]
    base = [each.samples_per_step / each.seconds_per_step for each in alone]
    speed_up = [own / one for own, one in zip(rate, base)]
    of_rank = zip(*(each.ranks for each in rounds))
    ranks = tuple(mean_phases(phases, statistics.median) for phases in of_rank)
    communication, waiting = exchange_and_waiting([ranks[rank] for rank in computing_ranks(ranks)])
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


@dataclass
class Rounds:
    """Measures layouts of one job."""

    config: JobConfig
    steps: int
    """Measured steps of each start."""
    warm_up: int
    """Steps before them."""
    folder: Path
    """For the files of the ranks."""
    _found: dict[Layout, list[Round]] = field(default_factory=dict, init=False)
    _refused: dict[Layout, str] = field(default_factory=dict, init=False)

    def measure(self, layouts: Sequence[Layout], rounds: int, say: Callable[[str], None]) -> list[Row]:
        """A row for one device, then one for each layout.

        Args:
            layouts: of several devices.
            rounds: number of starts of each layout.
            say: called with a line before each start.

        Raises:
            ConfigError: the job does not run on one device.
        """
        everything = [REFERENCE, *layouts]
        for number in range(rounds):
            for layout in everything:
                if layout not in self._refused:
                    say(f"round {number + 1} of {rounds}: {layout.label}")
                    self._start(layout)
            if reason := self._refused.get(REFERENCE):
                raise ConfigError(reason)
        return [
            Row(layout.label, layout.strategy, layout.devices, refused=reason)
            if (reason := self._refused.get(layout))
            else row(layout.label, layout.strategy, layout.devices, self._found[layout], self.alone)
            for layout in everything
        ]

    @property
    def alone(self) -> list[Round]:
        """The rounds of one device."""
        return self._found[REFERENCE]

    def _start(self, layout: Layout) -> None:
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        reason = run_layout(
            layout, self.config, "lockstep.scale.rank:main", folder, steps=self.steps, warm_up=self.warm_up
        )
        if (folder / "refused").exists():
            reason = (folder / "refused").read_bytes().decode(errors="surrogatepass")
        if reason:
            self._refused[layout] = reason
        else:
            self._found.setdefault(layout, []).append(Round.read(folder, layout.ranks))
