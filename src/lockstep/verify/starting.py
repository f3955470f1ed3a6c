"""Runs a job in one layout, for commands that compare layouts."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import EXIT_DONE
from lockstep.job.config import JobConfig
from lockstep.job.config_rules import machine_problems
from lockstep.launch.in_turn import run_in_turn
from lockstep.verify.layouts import Layout


def run_layout(layout: Layout, config: JobConfig, entry: str, folder: Path, **payload: int | str) -> str:
    """Runs an entry on the layout's ranks and gives the reason why it did not end well, or nothing.

    Args:
        layout: what the job is laid out as.
        config: the job.
        entry: ``module:function``, called with ``payload``, the ``config`` and the ``folder``.
        folder: is made here, for all that the ranks write.
        payload: what else the entry needs.
    """
    folder.mkdir()
    job = layout.of(config, str(folder))
    if problems := machine_problems(job, layout.devices, "cpu"):
        return " ".join(problem.text for problem in problems)
    given = {"config": job.to_json(), **payload}
    outcome = run_in_turn(entry, given, ranks=layout.ranks, threads=job.run.threads, folder=folder)
    if outcome.code == EXIT_DONE:
        return ""
    return outcome.lines[0] if outcome.lines else f"exit code {outcome.code}"
