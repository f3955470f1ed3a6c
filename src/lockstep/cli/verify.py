"""``lockstep verify``: runs a job in several layouts and proves that they agree, or says where and why they part."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.layout_options import device_counts, job_on_one_device, strategy_names
from lockstep.cli.parser import Parser
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.job.config import JobConfig
from lockstep.launch import ScriptTarget
from lockstep.strategy_options import STRATEGIES
from lockstep.verify.comparison import Comparison, compare
from lockstep.verify.layouts import DEVICES, REFERENCE, Layout, layouts
from lockstep.verify.starting import run_layout
from lockstep.verify.table import as_json, table
from lockstep.verify.trace import Trace

ENTRY = "lockstep.verify.rank:main"
EXIT_DIFFERENT = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "job", metavar="JOB", nargs="?", default="", help="a TOML file, or a built-in job (default: digits)"
    )
    parser.add_argument(
        "--devices", default="", metavar="N,N", help="numbers of CPU devices (default: 1,2,4)"
    )
    parser.add_argument(
        "--strategies", default="", metavar="A,B", help=f"of {', '.join(STRATEGIES)} (default: all)"
    )
    parser.add_argument(
        "--steps", type=int, default=12, metavar="N", help="optimizer steps of each run (default: 12)"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="writes all that was found")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any setting of the job"
    )
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENTS]",
        help="in place of a job: your own training script, and all that follows for it",
    )
    for name in ("data", "precision", "threads"):
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"as of 'lockstep train --{name}'")


def main(arguments: argparse.Namespace) -> int:
    """Runs the layouts and prints the table.

    Returns:
        1 if a layout does not keep what it promises, if one whose strategy was named did not run, or if none did.
    """
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} was asked for; it must be at least 1.")
    if arguments.script is not None:
        return _verify_script(arguments)
    config = job_on_one_device(arguments.job or "digits", arguments)
    names = strategy_names(arguments.strategies)
    counts = device_counts(arguments.devices) or list(DEVICES)
    chosen = layouts(config, counts, names, fitting=not arguments.devices)
    if not chosen:
        raise ConfigError(
            "Nothing is left to compare with one device. Give two devices or more, for example --devices 2,4; hybrid "
            "takes 4, 6, 8 and so on."
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        comparisons = _compare_all(config, chosen, arguments.steps, Path(folder))
    _show(comparisons, arguments)
    unproven = [each for each in comparisons if each.trace.refused]
    failed = any(each.is_broken for each in comparisons) or len(unproven) == len(chosen)
    return EXIT_DIFFERENT if failed or (names and unproven) else EXIT_DONE


def _verify_script(arguments: argparse.Namespace) -> int:
    """The same for a script: 1 where a run differs from one process by more than it may."""
    from lockstep.cli.verify_script import ScriptRuns

    if arguments.job:
        raise ConfigError(
            f"Both the job {arguments.job!r} and a script were given. Verify one of them at a time."
        )
    for name in ("strategies", "set", "data", "precision"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for jobs. A script is told by its own arguments, after its name.")
    if not arguments.script:
        raise ConfigError("--script needs a script: lockstep verify --script train.py.")
    target = ScriptTarget(path=arguments.script[0], arguments=tuple(arguments.script[1:]))
    worlds = [count for count in device_counts(arguments.devices) or DEVICES if count > 1]
    threads = arguments.threads
    if threads is not None and not threads.isdecimal():
        raise ConfigError(f"--threads {threads!r} is not a number.")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        runs = ScriptRuns(target, arguments.steps, threads and int(threads), Path(folder), _difference)
        comparisons = runs.compare(worlds)
    _show(comparisons, arguments)
    differs = any(each.is_broken or each.reached == "-" for each in comparisons)
    return EXIT_DIFFERENT if differs else EXIT_DONE


def _show(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> None:
    print(table(comparisons, arguments.steps))
    if arguments.json:
        Path(arguments.json).write_text(as_json(comparisons))


def _compare_all(config: JobConfig, chosen: Sequence[Layout], steps: int, folder: Path) -> list[Comparison]:
    reference = _run(config, REFERENCE, steps, folder / "reference")
    if reference.refused:
        raise ConfigError(reference.refused)
    comparisons = [Comparison(reference, "A")]
    repeats: bool | None = None
    for number, layout in enumerate(chosen):
        here = folder / str(number)
        print(f"running {layout.label} ({number + 1} of {len(chosen)})", file=sys.stderr)
        trace = _run(config, layout, steps, here)
        difference = 0.0 if trace.refused else _difference(folder / "reference", here)
        found = compare(reference, trace, difference)
        if found.diagnosis is not None and repeats is None:
            again = _run(config, REFERENCE, steps, folder / "again")
            repeats = compare(reference, again, 0.0).diagnosis is None
        if found.diagnosis is not None:
            found = compare(reference, trace, difference, repeats=repeats)
        comparisons.append(found)
    return comparisons


def _run(config: JobConfig, layout: Layout, steps: int, folder: Path) -> Trace:
    """The trace of one layout; a job that cannot run in it is a trace that says so."""
    trace = folder / "trace.json"
    reason = run_layout(layout, config, ENTRY, folder, steps=steps, label=layout.label)
    if not reason and trace.exists():
        return Trace.read(trace)
    reason = reason or "its ranks left no trace of their steps"
    return Trace(layout.label, layout.strategy, layout.ranks, "", refused=reason)


def _difference(reference: Path, other: Path) -> float:
    """The largest relative difference of a tensor between the ends of two runs."""
    import torch
    from safetensors.torch import load_file

    mine, theirs = (load_file(str(folder / "final.safetensors")) for folder in (reference, other))
    worst = 0.0
    for name, tensor in mine.items():
        gap = float((theirs[name].double() - tensor.double()).norm())
        worst = max(worst, gap / max(float(tensor.double().norm()), torch.finfo(torch.float32).tiny))
    return worst
