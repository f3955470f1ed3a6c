"""``lockstep lint``: a static check of any PyTorch training script."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from lockstep.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from lockstep.lint import Finding, check_file, choose, table

EXIT_FINDINGS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="Python files; they are read, never run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--select", default="", metavar="RULES", help="only these: LS001,LS05 or names")
    parser.add_argument("--ignore", default="", metavar="RULES", help="all but these")
    parser.add_argument("--rules", action="store_true", help="print the table of the rules, and end")


def main(arguments: argparse.Namespace) -> int:
    """Returns 0 where nothing was found, 1 where something was, 2 where a file could not be read."""
    rules = choose(arguments.select, arguments.ignore)
    if arguments.rules:
        sys.stdout.write(table(rules))
        return EXIT_DONE
    if not arguments.scripts:
        raise ConfigError("No script was named. Example: lockstep lint train.py")
    found: list[Finding] = []
    mistakes: list[str] = []
    for path in dict.fromkeys(arguments.scripts):
        try:
            found += check_file(path, rules)
        except ConfigError as error:
            mistakes.append(str(error))
    _print(found, mistakes, as_json=arguments.json)
    return EXIT_CONFIG if mistakes else EXIT_FINDINGS if found else EXIT_DONE


def _print(found: list[Finding], mistakes: list[str], as_json: bool) -> None:
    """Findings to standard output, what could not be read to standard error."""
    if as_json:
        report = {"findings": [asdict(finding) for finding in found], "mistakes": mistakes}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        for finding in found:
            sys.stdout.write(_printable(finding.text()) + "\n")
        if found:
            sys.stdout.write(f"{len(found)} finding{'s' if len(found) > 1 else ''}.\n")
    for sentence in mistakes:
        sys.stderr.write(f"lockstep: {_printable(sentence)}\n")


def _printable(text: str) -> str:
    """The text as this terminal can show it; lone surrogates of file names are escaped."""
    return text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(
        sys.stdout.encoding or "utf-8"
    )
