"""``lockstep port``: the lines of a script that change when it trains with Lockstep."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict

from lockstep.cli.lint import for_terminal
from lockstep.cli.shared_options import add_options
from lockstep.errors import EXIT_DONE
from lockstep.lint import changes_in
from lockstep.text import plural, shorten

_MOST_LINES, _WIDTH = 6, 100
_CHECKS = (
    "lockstep lint",
    "lockstep verify --micro-batches 1,8 --script",
    "lockstep verify --devices 2 --stop-after 5 --script",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("script", metavar="SCRIPT", help="the file with the training loop; it is read, never run")
    add_options(parser, ("--json", "", False, "print the changes as JSON"))


def main(arguments: argparse.Namespace) -> int:
    """Prints the changes section by section; returns 0. Raises ``ConfigError`` where there is nothing to port."""
    path = arguments.script
    found = changes_in(path)
    if arguments.json:
        table = {"path": path, "changes": [asdict(each) for each in found]}
        sys.stdout.write(json.dumps(table, indent=2) + "\n")
        return EXIT_DONE
    lines = [
        f"{path}: {plural(len(found), 'place')} to look at. docs/moving.md explains each; "
        "what is not listed usually stays."
    ]
    section = ""
    for each in found:
        if each.section != section:
            section = each.section
            lines += ["", section]
        source = each.source if len(each.source) <= _WIDTH else f"{each.source[:_WIDTH]}..."
        others = f"  (and {shorten(each.lines[1:], _MOST_LINES)})" if each.lines[1:] else ""
        lines += [f"{each.lines[0]:>5}  {source}{others}", f"       -> {each.advice}"]
    lines += ["", "Then check the port:"]
    lines += [f"    {each} {shlex.quote(path)}" for each in _CHECKS]
    sys.stdout.write("\n".join(map(for_terminal, lines)) + "\n")
    return EXIT_DONE
