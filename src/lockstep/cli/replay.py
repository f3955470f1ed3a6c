"""``lockstep replay``: recomputes a step of a run on one device, in this very process, where a debugger can follow."""

from __future__ import annotations

import argparse
import bdb
import logging
import os
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, print_origins
from lockstep.core.world import make_environment_portable
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from lockstep.job.run_folder import FILE, Start, read_starts
from lockstep.runtime.output import log_to_terminal


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/digits-001")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="optimizer step of the run, from 0")
    add_options(
        parser,
        ("--micro-batch", "K", int, "only this micro-batch of the step, counted from 0"),
        ("--debug", "", False, "stop in the debugger before the samples of the step are read"),
        ("--trust", "", False, "replay a run of another user, whose job names code that runs as you"),
        ("--force-context", "", False, "compare even if versions, device or threads of the run were others"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Replays the step and prints the comparison; returns 1 if it differs, 130 if the debugger was quit, else 0."""
    folder = Path(arguments.run)
    prepare_process(folder, arguments)
    from lockstep.replay import ReplayRequest, describe, find_origin, replay

    log_to_terminal(logging.WARNING)
    origin = find_origin(folder, arguments.step)
    print_origins(origin.start.job)
    asked = ReplayRequest(
        folder=folder,
        step=arguments.step,
        micro_batch=arguments.micro_batch,
        force_context=arguments.force_context,
        pause=_pause if arguments.debug else None,
    )
    try:
        report = replay(asked, origin)
    except bdb.BdbQuit:
        return EXIT_INTERRUPTED
    print(describe(report))
    return 1 if report.differs else EXIT_DONE


def prepare_process(folder: Path, arguments: argparse.Namespace) -> Start:
    """Prepares this process, which has not imported torch, to compute what a run computed; returns its last start.

    Raises:
        ConfigError: the run does not exist, or another user may have written it and ``--trust`` was not given.
    """
    for path in (folder, folder / FILE):
        if not arguments.trust and path.exists() and path.stat().st_uid != os.getuid():
            raise ConfigError(
                f"'{path}' belongs to user {path.stat().st_uid}, and the job in it names code that would run as you. "
                "Give --trust if you trust them."
            )
    start = read_starts(folder)[-1]
    if start.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if start.job.training.portable:
            make_environment_portable()
    return start


def _pause() -> None:
    """Stops in the debugger of ``PYTHONBREAKPOINT``, by default pdb."""
    print("The step runs next. Set breakpoints, such as 'b FILE.py:12', and continue with 'c'.")
    breakpoint()
