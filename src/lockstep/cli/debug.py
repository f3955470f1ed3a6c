"""``lockstep debug``: writes the configurations with which VS Code debugs a script or a job, or attaches to a rank."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from lockstep.cli.shared_options import add_options
from lockstep.config.checks import near_path
from lockstep.config.job_file import built_in_jobs, load_job
from lockstep.debug import DebugPlan, launch_entries, merge_into, task_entries
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import parse_devices
from lockstep.launch.debugger import DEFAULT_PORT, check_rank_and_port, request_debugger, require_debugpy
from lockstep.launch.runs import choose_run

_ANSWER_WITHIN = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments; all that follow the target belong to it."""
    add_options(
        parser,
        ("--devices", "N", "cpu:2", "devices of the run, as in 'lockstep run'"),
        ("--rank", "R", 0, "the rank to debug"),
        ("--port", "PORT", DEFAULT_PORT, "port of the debugger on 127.0.0.1"),
        ("--folder", "DIR", ".", "the folder that the editor opens"),
    )
    parser.add_argument(
        "--attach",
        nargs="?",
        const="",
        default=None,
        metavar="RUN",
        help="write nothing; make rank R of a running run (default: the only one) listen for a debugger",
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a script (.py), a job file or a built-in job")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="all that follows is for the target"
    )


def main(arguments: argparse.Namespace) -> int:
    """Writes ``.vscode/launch.json`` and ``.vscode/tasks.json``, or asks a rank; returns the exit status."""
    if arguments.attach is not None:
        return _attach(arguments)
    if arguments.target is None:
        raise ConfigError("No script or job was given. Example: lockstep debug --rank 1 train.py")
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ConfigError(f"--folder {arguments.folder!r} is not a folder. Check the path.")
    check_rank_and_port(arguments.rank, parse_devices(arguments.devices).count, arguments.port)
    if arguments.port == 0:
        raise ConfigError("The editor must know the port in advance. Set --port to a number from 1 to 65535.")
    plan = DebugPlan(
        target=_within(folder, arguments.target),
        arguments=tuple(arguments.arguments),
        devices=arguments.devices,
        rank=arguments.rank,
        port=arguments.port,
    )
    _write(folder / ".vscode", plan)
    return EXIT_DONE


def _attach(arguments: argparse.Namespace) -> int:
    """Makes a running rank listen for a debugger and prints the address."""
    require_debugpy()
    run = choose_run(arguments.attach)
    check_rank_and_port(arguments.rank, run.ranks, arguments.port)
    address = request_debugger(run, arguments.rank, arguments.port, _ANSWER_WITHIN)
    print(f"rank {arguments.rank} of run {run.run_id} serves a debugger at {address}")
    return EXIT_DONE


def _write(settings: Path, plan: DebugPlan) -> None:
    tasks, launch = task_entries(plan), launch_entries(plan)
    for name, key, label, entries, version in (
        ("tasks.json", "tasks", "label", tasks, "2.0.0"),
        ("launch.json", "configurations", "name", launch, "0.2.0"),
    ):
        changed = merge_into(settings / name, key, label, entries, version)
        print(f"{settings / name}: {'written' if changed else 'up to date'}")
    for entry in launch:
        print(f"    {entry['name']}")
    if importlib.util.find_spec("debugpy") is None:
        print("debugpy is not installed here, and ranks need it: pip install 'lockstep-train[debug]'")


def _within(folder: Path, target: str) -> str:
    """The target relative to the editor's folder. Raises ``ConfigError`` where it does not exist."""
    if target in built_in_jobs():
        return target
    path = Path(target)
    if not DebugPlan(target=target).is_script:
        load_job(target, [])
    elif not path.is_file():
        raise ConfigError(f"The script {target!r} is not a file.{near_path(path) or ' Check the path.'}")
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError as error:
        raise ConfigError(
            f"{target} is not in the folder {folder.resolve()} that the editor opens. Set that folder with --folder."
        ) from error
