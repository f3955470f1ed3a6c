"""The layouts of a job that are compared, strategies on numbers of devices, and a run of the job in one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.job import JobConfig
from lockstep.config.rules import machine_problems
from lockstep.config.strategy_options import ONE_PROCESS, STRATEGIES
from lockstep.core.mesh import HYBRIDS, Mesh
from lockstep.errors import EXIT_DONE
from lockstep.launch.supervisor import run_sequentially

DEVICES = (1, 2, 4)
"""Default numbers of devices; those above the recipe's micro-batches are left out."""
RUN_FOLDER = "run"
"""Where a run that verify observes writes to, in verify's own folder."""


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of devices."""

    strategy: str
    devices: int
    mesh: str = ""
    mode: str = ""
    """Of strategy parameter_server; empty for synchronous."""

    @property
    def label(self) -> str:
        """As in ``ddp on 4``."""
        mode = f" ({self.mode})" if self.mode else ""
        return f"{self.mesh or self.strategy}{mode} on {self.devices}"

    @property
    def ranks(self) -> int:
        """The number of processes."""
        if self.mesh:
            return Mesh.parse(self.mesh).ranks
        return 1 if self.strategy in ONE_PROCESS else self.devices

    def of(self, config: JobConfig, directory: str, resume: str = "") -> JobConfig:
        """The job in this layout, which writes only into ``directory``, and resumes from the run folder ``resume``."""
        changed: dict[str, dict[str, Any]] = {
            "training": {"strategy": self.strategy, "mesh": self.mesh},
            "run": {"devices": f"cpu:{self.devices}", "directory": directory, "name": RUN_FOLDER},
            "log": {"tensorboard": False, "json": False, "progress": False},
            "checkpoint": {"resume": resume},
            "parameter_server": {"mode": self.mode or "synchronous"},
        }
        if (option := ONE_PROCESS.get(self.strategy)) is not None:
            changed[self.strategy] = {option: self.devices}
        parts = {name: dataclasses.replace(getattr(config, name), **new) for name, new in changed.items()}
        return dataclasses.replace(config, **parts)


REFERENCE = Layout("single", 1)


def layouts(
    config: JobConfig, devices: Iterable[int], strategies: Sequence[str], *, fitting: bool = True
) -> list[Layout]:
    """The layouts to compare with ``REFERENCE``, of some strategies (all if empty) on numbers of devices.

    ``fitting`` leaves out numbers of devices above the recipe's micro-batches.
    """
    found = []
    for count in devices:
        if fitting and count > config.training.micro_batches:
            continue
        for strategy in strategies or STRATEGIES:
            if strategy in ("single", "hybrid") or (count == 1 and strategy != "ddp"):
                continue
            found.append(Layout(strategy, count))
            if strategy == "parameter_server":
                found.append(Layout(strategy, count, mode="asynchronous"))
        if count >= 4 and count % 2 == 0 and (not strategies or "hybrid" in strategies):
            found += [Layout("hybrid", count, f"{first}=2,{second}={count // 2}") for first, second in HYBRIDS]
    return found


def run_layout(
    layout: Layout, config: JobConfig, entry: str, folder: Path, *, resume: str = "", **payload: int | str
) -> str:
    """Runs an entry on the layout's ranks and returns the reason of a failure, or an empty text.

    Args:
        layout: the layout.
        config: the job.
        entry: ``module:function``, called with ``payload``, the ``config`` and the ``folder``.
        folder: created for the files of the ranks.
        resume: see ``Layout.of``.
        payload: further arguments of the entry.
    """
    folder.mkdir()
    job = layout.of(config, str(folder), resume)
    if problems := machine_problems(job, layout.devices, "cpu"):
        return " ".join(problem.text for problem in problems)
    given = {"config": job.to_json(), **payload}
    outcome = run_sequentially(
        entry,
        given,
        ranks=layout.ranks,
        threads=job.run.threads,
        portable=bool(job.training.portable),
        folder=folder,
    )
    if outcome.code == EXIT_DONE:
        return ""
    return reason_of(outcome.lines) or f"exit code {outcome.code}"


def reason_of(report: Sequence[str]) -> str:
    """Shortens the report of a failed run to one line: the rank, and the error without its notes."""
    first = report[0] if report else ""
    if not first.endswith(":"):
        return first
    calls = [number for number, line in enumerate(report) if line.startswith("  File ")]
    below = report[calls[-1] + 1 :] if calls else report[1:]
    error = next((line for line in below if line and not line.startswith((" ", "Logs: "))), "")
    return f"{first} {error}" if error else first
