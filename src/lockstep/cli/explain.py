"""``lockstep explain`` and ``lockstep compare``: draw what ranks do, and the curves of several runs.

lockstep explain   who reads, adds, sends and computes what, for given numbers
lockstep compare   the settings in which several runs differ, their fingerprints and their curves
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.shared_options import add_options, require_files, write_file, write_files
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.text import aligned, comma_separated, printable

if TYPE_CHECKING:
    from lockstep.job.run_folder import Start

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


def number(words: str) -> int:
    """Parses a count such as ``25M``, ``1.5G`` or ``21,797,672``. Raises ``ConfigError`` where it is not one."""
    plain = words.replace(",", "").replace("_", "")
    unit = _UNITS.get(plain[-1:], 1)
    try:
        return round(float(plain if unit == 1 else plain[:-1]) * unit)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--parameters {words} is not a number. Use one such as 21797672 or 25M.") from error


_RANKS = "data-parallel ranks"
_MICRO_BATCHES = "micro-batches of a step (default: "
_SUBJECTS: dict[str, tuple[str, list[tuple[str, str, Any, str]]]] = {
    "samples": (
        "which rank reads which samples, compared with torch's sampler",
        [
            ("--samples", "N", 11, "size of the data set"),
            ("--ranks", "N", 2, _RANKS),
            ("--batch", "N", 2, "samples of a rank in a step"),
            ("--micro-batches", "K", int, f"{_MICRO_BATCHES}as many as ranks)"),
            ("--shuffle", "", False, "shuffle by --seed and --epoch"),
            ("--seed", "N", 0, "seed of the order"),
            ("--epoch", "N", 0, "epoch of the order"),
            ("--drop-last", "", False, "skip the samples that do not fill the last step"),
        ],
    ),
    "tree": (
        "how micro-batches fold into the fixed summation tree",
        [
            ("--ranks", "N", 2, _RANKS),
            ("--micro-batches", "K", int, f"{_MICRO_BATCHES}8, or as many as ranks)"),
            ("--leaves", "N", int, "micro-batches that are not empty, as in a last step that is not full"),
        ],
    ),
    "traffic": (
        "who sends what to whom: ring, ordered, parameter server",
        [
            ("--ranks", "N", 4, "ranks that compute gradients"),
            ("--servers", "N", 1, "parameter servers, in addition to the ranks"),
            ("--micro-batches", "K", int, f"{_MICRO_BATCHES}8, or as many as ranks)"),
            ("--parameters", "N", str, "parameters of the model, such as 25M (default: those of ResNet-34)"),
        ],
    ),
    "pipeline": (
        "when each rank of a pipeline computes what",
        [
            ("--stages", "N", 4, "ranks of the pipeline"),
            ("--micro-batches", "K", int, f"{_MICRO_BATCHES}the first multiple of the stages from 8 on)"),
            ("--schedule", "NAME", str, "1f1b, gpipe or interleaved (default: all)"),
            ("--stages-per-rank", "N", 2, "stages of each rank, for interleaved"),
        ],
    ),
    "timeline": ("what the ranks of a run did and when, from its timeline", []),
}
"""The pictures, each with its sentence and its numbers: the arguments of its ``explain_...`` function."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subjects, each with its numbers."""
    subjects = parser.add_subparsers(title="subjects", metavar="SUBJECT", required=True, dest="subject")
    for name, (summary, options) in _SUBJECTS.items():
        subject = subjects.add_parser(name, help=summary, description=f"Draws {summary}.")
        add_options(
            subject,
            ("--svg", "FILE", str, "write the picture as one self-contained SVG"),
            ("--json", "", False, "print the numbers behind the picture as JSON"),
            *options,
        )
        if name == "timeline":
            subject.add_argument("file", metavar="FILE", help="timeline.json of a run with --profile")


def main(arguments: argparse.Namespace) -> int:
    """Prints the picture, or writes it as SVG."""
    name = arguments.subject
    # Its subject only is imported: traffic and pipeline need torch, the tree does not.
    module = importlib.import_module(f"lockstep.explain.{name}")
    facts = getattr(module, f"explain_{name}")(**_given(arguments))
    if arguments.svg is not None:
        write_file(arguments.svg, getattr(module, f"{name}_svg")(facts))
    if arguments.json:
        sys.stdout.write(json.dumps(facts.as_json(), indent=2) + "\n")
    elif arguments.svg is None:
        sys.stdout.write(getattr(module, f"{name}_text")(facts) + "\n")
    else:
        sys.stdout.write(f"Wrote {arguments.svg}.\n")
    return EXIT_DONE


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the function that explains; those that were not given have its defaults."""
    if arguments.subject == "timeline":
        return {"path": Path(arguments.file)}
    flags = (flag for flag, *_ in _SUBJECTS[arguments.subject][1])
    names = (flag.removeprefix("--").replace("-", "_") for flag in flags)
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if "parameters" in given:
        given["parameters"] = number(given["parameters"])
    if "schedule" in given:
        given["schedules"] = (given.pop("schedule"),)
    return given


_FILES = {
    "html": "write a self-contained HTML page with the curves and the table",
    "svg": "write the curves as SVG",
    "png": "write the curves as PNG",
}


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the runs, their names and the files."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, such as runs/digits-001")
    files = ((f"--{name}", "FILE", "", what) for name, what in _FILES.items())
    add_options(parser, ("--labels", "A,B", "", "names of the runs (default: those of their folders)"), *files)


def _differences(jobs: Mapping[str, Start]) -> dict[str, list[tuple[str, ...]]]:
    """The differences between the last starts of runs, as tables by their titles."""
    from lockstep.job.run_folder import conditions_that_differ, decides_result, settings_that_differ

    head, *settings = settings_that_differ(jobs)
    tables = {
        "Settings of the recipe that differ": [head, *(row for row in settings if decides_result(row[0]))],
        "Conditions of the bits that differ": conditions_that_differ(jobs),
        "Other settings that differ, which change no bit under level A": [
            *(head, *(row for row in settings if not decides_result(row[0])))
        ],
    }
    return {title: rows for title, rows in tables.items() if len(rows) > 1}


def compare(arguments: argparse.Namespace) -> int:
    """Prints a table of the runs and writes what was asked for; returns the exit status."""
    from lockstep.explain.chart import png, svg
    from lockstep.explain.curves import chart, page, read_logs, text
    from lockstep.job.prediction import recorded_fingerprint
    from lockstep.job.run_folder import FILE, read_starts

    require_files(arguments, _FILES)
    folders = [Path(run) for run in arguments.runs]
    logs = read_logs(folders, comma_separated(arguments.labels))
    jobs = {
        log.name: read_starts(folder)[-1]
        for log, folder in zip(logs, folders, strict=True)
        if (folder / FILE).is_file()
    }
    found = {log.name: recorded_fingerprint(folder) for log, folder in zip(logs, folders, strict=True)}
    fingerprints = {name: each for name, each in found.items() if each}
    print(printable(text(logs, fingerprints)))
    differences = _differences(jobs) if len(jobs) > 1 else {}
    for title, rows in differences.items():
        print(f"\n{title}:", *aligned(rows), sep="\n")
    if len(jobs) > 1 and not differences:
        print("\nNo setting differs.")
    contents: dict[str, Callable[[], str | bytes]] = {
        "html": lambda: page(logs, fingerprints, differences),
        "svg": lambda: svg(chart(logs)),
        "png": lambda: png(chart(logs)),
    }
    write_files(arguments, contents)
    return EXIT_DONE


COMMANDS = {"explain": (add_arguments, main), "compare": (add_compare_arguments, compare)}
