"""Runs the layouts of a job in alternating rounds, so that a slow moment of the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.scale.measured import Round, Row, row
from lockstep.verify.layouts import REFERENCE, Layout
from lockstep.verify.starting import run_layout

_ENTRY = "lockstep.scale.rank:main"


@dataclass
class Rounds:
    """Measures layouts of one job.

    Args:
        config: the job.
        steps: measured ones of each start.
        warm_up: steps before them, which are not measured.
        folder: for what the ranks write.
    """

    config: JobConfig
    steps: int
    warm_up: int
    folder: Path
    _found: dict[Layout, list[Round]] = field(default_factory=dict, init=False)
    _refused: dict[Layout, str] = field(default_factory=dict, init=False)

    def measure(self, layouts: Sequence[Layout], rounds: int, say: Callable[[str], None]) -> list[Row]:
        """A row for one device, then one for each layout.

        Args:
            layouts: of several devices.
            rounds: how often each is started.
            say: is told what is about to run.

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
        return [self._row(layout) for layout in everything]

    @property
    def alone(self) -> list[Round]:
        """What was measured on one device."""
        return self._found[REFERENCE]

    def _row(self, layout: Layout) -> Row:
        if reason := self._refused.get(layout):
            return Row(layout.label, layout.strategy, layout.devices, refused=reason)
        return row(layout.label, layout.strategy, layout.devices, self._found[layout], self.alone)

    def _start(self, layout: Layout) -> None:
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        extra = {"steps": self.steps, "warm_up": self.warm_up}
        reason = run_layout(layout, self.config, _ENTRY, folder, **extra)
        if (folder / "refused").exists():
            reason = (folder / "refused").read_text()
        if reason:
            self._refused[layout] = reason
        else:
            self._found.setdefault(layout, []).append(Round.read(folder, layout.ranks))
