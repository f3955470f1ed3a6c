"""``lockstep slurm``: writes the batch script of a job, and submits it if asked."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

from lockstep.cli import train
from lockstep.cli.parser import Parser
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.job.config_file import load_job
from lockstep.job.config_rules import machine_problems
from lockstep.launch.batch_job import BatchJob

_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2}")
_TRAIN_OPTIONS = ("data", "strategy", "mesh", "precision", "epochs", "threads")


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments: those of a cluster, and those of ``train`` that fit there."""
    parser.add_argument("job", metavar="JOB", help="a TOML file, or the name of a built-in job")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="N", help="a rank for each; 0: CPUs (default)"
    )
    parser.add_argument(
        "--tasks-per-node", type=int, default=None, metavar="N", help="ranks per host, on CPUs"
    )
    parser.add_argument("--cpus-per-task", type=int, default=None, metavar="N", help="cores of each rank")
    parser.add_argument(
        "--time", default="", metavar="H:MM:SS", help="limit of one run; it resumes after that"
    )
    parser.add_argument("--partition", default="", metavar="NAME", help="partition of the cluster")
    parser.add_argument(
        "--warn", type=int, default=120, metavar="SECONDS", help="time to save in (default: 120)"
    )
    parser.add_argument(
        "--restarts", type=int, default=20, metavar="N", help="times it goes on at most (default: 20)"
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="any option of sbatch, as is"
    )
    parser.add_argument(
        "--output", default="", metavar="FILE", help="where to write the script (default: terminal)"
    )
    parser.add_argument("--submit", action="store_true", help="give it to sbatch")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any setting of the job"
    )
    for name in _TRAIN_OPTIONS:
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"as of 'lockstep train --{name}'")


def main(arguments: argparse.Namespace) -> int:
    """Writes or submits the script and returns the exit status."""
    job = batch_job(arguments)
    if arguments.output:
        path = Path(arguments.output)
        path.write_text(job.text)
        path.chmod(0o755)
        print(f"Wrote {path}. Submit it with: sbatch {path}")
    if arguments.submit:
        print(_submit(job.text))
    elif not arguments.output:
        print(job.text, end="")
    return EXIT_DONE


def batch_job(arguments: argparse.Namespace) -> BatchJob:
    """The script's content; ``ConfigError`` where the job and the hosts do not fit."""
    for name in ("nodes", "tasks_per_node", "cpus_per_task", "warn"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} was asked for; it must be at least 1.")
    if arguments.time and not _TIME.fullmatch(arguments.time):
        raise ConfigError(f"--time {arguments.time!r} is not a time. Write minutes, H:MM:SS or D-HH:MM:SS.")
    tasks = arguments.tasks_per_node or arguments.gpus_per_node or 1
    given = argparse.Namespace(**{**vars(arguments), "devices": None, "resume": None})
    config = load_job(arguments.job, train.overrides(given))
    problems = machine_problems(config, arguments.nodes * tasks)
    if problems:
        raise ConfigError(" ".join(problem.text for problem in problems))
    return BatchJob(
        name=config.job,
        command=tuple(_command(arguments)),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        tasks_per_node=tasks,
        cpus_per_task=arguments.cpus_per_task
        or (config.run.threads if not arguments.gpus_per_node else None),
        time=arguments.time,
        partition=arguments.partition,
        output=f"{config.job}-%j.log",
        warn_seconds=arguments.warn,
        restarts=arguments.restarts,
        extra=tuple(arguments.sbatch),
    )


def _command(arguments: argparse.Namespace) -> list[str]:
    words = ["lockstep", "train", arguments.job]
    for text in arguments.set:
        words += ["--set", text]
    for name in _TRAIN_OPTIONS:
        if getattr(arguments, name) is not None:
            words += [f"--{name}", getattr(arguments, name)]
    return words


def _submit(script: str) -> str:
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            "sbatch is not on this host. Write the script with --output FILE and submit it elsewhere."
        )
    done = subprocess.run([program], input=script, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip()
