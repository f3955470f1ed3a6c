"""``lockstep lint`` and ``lockstep port``: read training scripts and run none of them.

lockstep lint   checks scripts for the known mistakes of distributed training
lockstep port   lists the lines of a script that change when it trains with Lockstep
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from lockstep.cli.shared_options import add_options
from lockstep.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from lockstep.lint import Finding, changes_in, check_file, choose, table
from lockstep.text import plural, printable, shorten

EXIT_FINDINGS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="a Python file or a folder; it is read, never run")
    add_options(
        parser,
        ("--json", "", False, "print the findings as JSON"),
        ("--select", "RULES", "", "only these rules, such as LS001,LS05 or names"),
        ("--ignore", "RULES", "", "all rules except these"),
        ("--rules", "", False, "print the table of rules and exit"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if there are any, 2 if a file could not be read, else 0."""
    rules = choose(arguments.select, arguments.ignore)
    if arguments.rules:
        sys.stdout.write(table(rules))
        return EXIT_DONE
    if not arguments.scripts:
        raise ConfigError("No script was given. Example: lockstep lint train.py")
    found: list[Finding] = []
    mistakes: list[str] = []
    for path in dict.fromkeys(each for given in arguments.scripts for each in _files(given)):
        try:
            found += check_file(path, rules)
        except ConfigError as error:
            mistakes.append(str(error))
    _print(found, mistakes, as_json=arguments.json)
    return EXIT_CONFIG if mistakes else EXIT_FINDINGS if found else EXIT_DONE


def _files(given: str) -> list[str]:
    """The Python files below a folder, but for those in hidden folders; else what was given."""
    below = sorted(Path(given).rglob("*.py")) if Path(given).is_dir() else []
    visible = [each for each in below if not any(part[0] == "." for part in each.relative_to(given).parts)]
    return list(map(str, visible)) or [given]


def _print(found: list[Finding], mistakes: list[str], as_json: bool) -> None:
    """Prints the findings to standard output, and the files that could not be read to standard error."""
    if as_json:
        findings = [asdict(each) | {"mend": each.fix} for each in found]  # "mend" was the name of "fix"
        report = {"findings": findings, "mistakes": mistakes}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        for finding in found:
            sys.stdout.write(for_terminal(finding.text()) + "\n")
        if found or not mistakes:
            sys.stdout.write(f"{plural(len(found), 'finding') if found else 'No finding'}.\n")
    for sentence in mistakes:
        sys.stderr.write(f"lockstep: {for_terminal(sentence)}\n")


def for_terminal(text: str) -> str:
    """The text as this terminal can show it; lone surrogates and control characters of file names are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text.encode(encoding, "backslashreplace").decode(encoding))


_MOST_LINES, _WIDTH = 6, 100
_CHECKS = (
    "lockstep lint",
    "lockstep verify --micro-batches 1,8 --script",
    "lockstep verify --devices 2 --stop-after 5 --script",
)


def add_port_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("script", metavar="SCRIPT", help="the file with the training loop; it is read, never run")
    add_options(parser, ("--json", "", False, "print the changes as JSON"))


def port(arguments: argparse.Namespace) -> int:
    """Prints the changes section by section; returns 0. Raises ``ConfigError`` where there is nothing to port."""
    path = arguments.script
    found = changes_in(path)
    if arguments.json:
        report = {"path": path, "changes": [asdict(each) for each in found]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
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


COMMANDS = {"lint": (add_arguments, main), "port": (add_port_arguments, port)}
