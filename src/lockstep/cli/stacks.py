"""``lockstep stacks``: in which line every rank of a run stands right now; the run goes on undisturbed."""

from __future__ import annotations

import argparse

from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch.runs import choose_run
from lockstep.launch.stalls import ask_all, sight_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="its id, or the beginning or end of it (default: the only one)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Shows the stacks and returns the exit status."""
    run = choose_run(arguments.run)
    sights = ask_all(run.directory, {rank: beat.pid for rank, beat in run.beats.items()}, {})
    if not sights:
        raise ConfigError(f"The run {run.run_id} has no rank that could be asked yet.")
    print("\n".join(sight_lines(sights)))
    return EXIT_DONE
