"""``lockstep slurm``: writes or submits the batch script that trains a job on a SLURM cluster.

The script resumes the job after every preemption, and after the time limit of each run.
"""

from __future__ import annotations

import argparse
import re
import shlex

from lockstep.cli import train
from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import (
    add_options,
    add_train_options,
    deliver,
    node_options,
    require_at_least,
    require_files,
    require_positive,
)
from lockstep.errors import ConfigError

_SCRIPT = """\
#!/bin/bash
{head}

# One task on each node starts the ranks of the node and watches them. Before the time is over, or when the job is
# preempted, the ranks save and the tasks exit with status 75: the job goes back into the queue and resumes there. So it
# does if a task was killed (status 137), even where the other nodes have completed the run.
{token}status=0
srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    {command} || status=$?
if [[ "$status" =~ ^(75|137)$ ]] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # the requeue ends this script
fi
exit "$status"
"""
_TOKEN = """\
# The secret by which the nodes of this job know each other. It is in no file.
LOCKSTEP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export LOCKSTEP_TOKEN
"""
_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2}")


def add_arguments(parser: Parser) -> None:
    """Declares the arguments of the cluster, and those of ``train`` that fit there."""
    add_options(
        parser,
        ("job", "JOB", str, "a TOML file, or the name of a built-in job"),
        *node_options("number of hosts"),
        ("--time", "H:MM:SS", "", "time limit of one run, after which it resumes in another"),
        ("--partition", "NAME", "", "partition of the cluster"),
        ("--warn", "SECONDS", 120, "time to save before the limit"),
        ("--restarts", "N", 20, "the most times that it resumes"),
        ("--sbatch", "OPTION", [], "any option of sbatch, passed as it is"),
        ("--output", "FILE", "", "file to write the script to (default: the terminal)"),
        ("--submit", "", False, "submit the script with sbatch"),
    )
    add_train_options(parser, *train.OPTIONS_OF_NODES)


def main(arguments: argparse.Namespace) -> int:
    """Writes or submits the script and returns the exit status."""
    require_files(arguments, ("output",))
    return deliver(arguments, batch_script(arguments), ["sbatch"], "Submit it with: sbatch {}")


def batch_script(arguments: argparse.Namespace) -> str:
    """Returns the script. Raises ``ConfigError`` where the job and the hosts do not fit."""
    require_positive(arguments, "nodes", "tasks_per_node", "cpus_per_task", "warn")
    require_at_least(arguments, 0, "gpus_per_node")
    if arguments.time and not _TIME.fullmatch(arguments.time):
        raise ConfigError(f"--time {arguments.time!r} is not a time. Use minutes, H:MM:SS or D-HH:MM:SS.")
    config, ranks, cores = train.job_of_nodes(arguments)
    options = {
        "job-name": config.job,
        "nodes": arguments.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": arguments.gpus_per_node or "",
        "cpus-per-task": cores,
        "time": arguments.time,
        "partition": arguments.partition,
        "output": f"{config.job}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{arguments.warn}",
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value != ""]
    head = "\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *arguments.sbatch])
    own = ["--nnodes", "slurm", "--set", f"run.name={config.job}-JOB", "--resume", "auto"]
    words = [*train.command_of_node(arguments, ranks, arguments.warn), *own]
    command = shlex.join(words).replace("-JOB", "-${SLURM_JOB_ID}")
    token = _TOKEN if arguments.nodes > 1 else ""
    return _SCRIPT.format(head=head, token=token, command=command, restarts=arguments.restarts)
