"""The batch script that trains a job on a SLURM cluster, and goes on after every preemption."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch script."""

    name: str
    command: tuple[str, ...]
    """What every rank runs, without the options that this script adds."""
    nodes: int = 1
    gpus_per_node: int = 0
    """0: ranks compute on CPUs."""
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    time: str = ""
    partition: str = ""
    output: str = ""
    warn_seconds: int = 120
    """How long before the end of its time the job is told to save."""
    restarts: int = 20
    """How often the job goes back into the queue at most."""
    extra: tuple[str, ...] = ()
    """Further lines for ``#SBATCH``."""

    @property
    def text(self) -> str:
        """The script."""
        return "\n".join(["#!/bin/bash", *self._directives(), "", *self._body(), ""])

    def _directives(self) -> list[str]:
        options: list[tuple[str, object]] = [
            ("job-name", self.name),
            ("nodes", self.nodes),
            ("ntasks-per-node", self.tasks_per_node),
            ("gpus-per-node", self.gpus_per_node or ""),
            ("cpus-per-task", self.cpus_per_task or ""),
            ("time", self.time),
            ("partition", self.partition),
            ("output", self.output),
            ("open-mode", "append"),
            ("signal", f"USR1@{self.warn_seconds}"),
        ]
        lines = [f"#SBATCH --{name}={value}" for name, value in options if value != ""]
        return [*lines, "#SBATCH --requeue", *(f"#SBATCH {line}" for line in self.extra)]

    def _body(self) -> list[str]:
        words = [*self.command, "--set", f"run.name={self.name}-JOB", "--resume", "auto"]
        command = shlex.join(words).replace("-JOB", "-${SLURM_JOB_ID}")
        return [
            "# Every rank is a task of one step. Before its time is over, or when it is preempted, the ranks save and",
            "# leave with status 75: the job then goes back into the queue and resumes from its last checkpoint.",
            "status=0",
            f"srun --kill-on-bad-exit=1 {command} || status=$?",
            f'if [ "$status" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.restarts} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "    sleep 60  # the requeue ends this script",
            "fi",
            'exit "$status"',
        ]
