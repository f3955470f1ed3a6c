"""``lockstep compare``: draws loss, accuracy and learning rate of several runs against epochs and against time."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.shared_options import add_options, require_files
from lockstep.errors import EXIT_DONE
from lockstep.explain.chart import png, svg
from lockstep.explain.curves import chart, page, read_logs, text
from lockstep.text import comma_separated

_FILES = {
    "html": "write a self-contained HTML page with the curves and the table",
    "svg": "write the curves as SVG",
    "png": "write the curves as PNG",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, such as runs/digits-001")
    files = ((f"--{name}", "FILE", "", what) for name, what in _FILES.items())
    add_options(
        parser, ("--labels", "A,B", "", "names of the runs (default: those of their folders)"), *files
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints a table of the runs and writes what was asked for; returns the exit status."""
    require_files(arguments, _FILES)
    logs = read_logs([Path(run) for run in arguments.runs], comma_separated(arguments.labels))
    print(text(logs))
    if arguments.html:
        Path(arguments.html).write_text(page(logs), encoding="utf-8")
    if arguments.svg:
        Path(arguments.svg).write_text(svg(chart(logs)), encoding="utf-8")
    if arguments.png:
        Path(arguments.png).write_bytes(png(chart(logs)))
    return EXIT_DONE
