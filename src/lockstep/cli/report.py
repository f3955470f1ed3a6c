"""``lockstep report``: one page of HTML about a run, which needs no network."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.replay import prepare_process
from lockstep.cli.shared_options import add_options, print_origins, require_files
from lockstep.core.atomic import write_whole
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.runtime.output import log_to_terminal


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/digits-001")
    add_options(
        parser,
        ("--html", "FILE", "", "the file to write (default: report.html in the run folder)"),
        ("--recorded-only", "", False, "compute nothing: only what the run folder holds"),
        ("--trust", "", False, "report a run of another user, whose job names code that runs as you"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Writes the page and names it; returns the exit status."""
    require_files(arguments, ["html"])
    folder = Path(arguments.run)
    start = prepare_process(folder, arguments)
    from lockstep.explain.run_report import run_page

    log_to_terminal(logging.WARNING)
    if not arguments.recorded_only:
        print_origins(start.job)
    path = Path(arguments.html) if arguments.html else folder / "report.html"
    page = run_page(folder, computes=not arguments.recorded_only)
    try:
        write_whole(path, page.encode(errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}.") from error
    print(f"Wrote {path}.")
    return EXIT_DONE
