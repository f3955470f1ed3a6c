"""``lockstep replay``: recomputes a step of a run on one device, in this very process, where a debugger can follow."""

from __future__ import annotations

import argparse
import bdb
import os
from pathlib import Path

from lockstep.cli.parser import Parser
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED

EXIT_DIFFERENT = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="run folder, such as runs/digits-001")
    parser.add_argument(
        "--step", type=int, required=True, metavar="S", help="optimizer step, counted from 0 over all epochs"
    )
    parser.add_argument(
        "--micro-batch", type=int, metavar="K", help="only this micro-batch of the step, counted from 0"
    )
    parser.add_argument(
        "--debug", action="store_true", help="stop in the debugger before the step's samples are read"
    )
    parser.add_argument(
        "--force-context",
        action="store_true",
        help="compare although the run had other software, another device or other threads",
    )


def main(arguments: argparse.Namespace) -> int:
    """Replays, prints what was found, and returns 1 if a record says otherwise, 130 if the debugger was quit."""
    import logging

    from lockstep.replay import Asked, describe, find_origin, replay

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = Path(arguments.run)
    origin = find_origin(folder, arguments.step)
    if origin.start.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    asked = Asked(
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
    return EXIT_DIFFERENT if report.differs else EXIT_DONE


def _pause() -> None:
    """Stops in the debugger that ``PYTHONBREAKPOINT`` names, by default pdb."""
    print("The step comes next. Set breakpoints, such as 'b FILE.py:12', and continue with 'c'.")
    breakpoint()
