"""``lockstep verify``: compares a job in several layouts, or a script on several numbers of processes, with one device.

The table says for each whether it is equal bit for bit, and if not, in which step and why it differs first. With
``--stop-after`` each is also stopped, and resumed in the next one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, add_train_options, require_at_least, require_files, write_file
from lockstep.cli.train import device_counts, job_on_one_device, strategy_names
from lockstep.config.strategy_options import STRATEGIES
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import ScriptTarget
from lockstep.text import comma_separated, plural
from lockstep.verify import micro_batches
from lockstep.verify.diagnosis import Comparison
from lockstep.verify.layouts import DEVICES, REFERENCE, compare_all, layouts, run_job, run_script
from lockstep.verify.micro_batches import AS_IT_IS, VARIANTS, FirstStep, compared
from lockstep.verify.report import as_json, table

EXIT_DIFFERENT = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("job", "JOB", "", "a TOML file, a folder of images or a built-in job (default: digits)"),
        ("--devices", "N,N", "", "numbers of CPU devices to compare (default: 1,2,4)"),
        ("--strategies", "A,B", "", f"some of {', '.join(STRATEGIES)} (default: all)"),
        ("--steps", "N", 12, "optimizer steps of each run"),
        ("--stop-after", "N", "", "stop each layout after N steps, too, and resume it in the next one"),
        ("--micro-batches", "K,K", "", "compare the first step in K micro-batches, as in 1,8, on one device"),
        ("--json", "FILE", "", "write all results to a file"),
    )
    parser.add_argument(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGUMENTS]",
        help="instead of a job, your own training script; all that follows is for the script",
    )
    add_train_options(parser, "data", "precision", "threads")


def main(arguments: argparse.Namespace) -> int:
    """Runs the layouts and prints the table.

    Returns:
        1 if a layout breaks its promise or refuses the program while it trains, if one whose strategy was given did not
        run, or if none ran; else 0.
    """
    require_at_least(arguments, 1, "steps")
    require_files(arguments, ("json",))
    stop_after = _stop_after(arguments)
    if arguments.micro_batches:
        return _verify_micro_batches(arguments)
    if arguments.script is not None:
        return _verify_script(arguments, stop_after)
    config = job_on_one_device(arguments.job or "digits", arguments)
    names = strategy_names(arguments.strategies)
    counts = device_counts(arguments.devices) or list(DEVICES)
    chosen = layouts(config, counts, names, fitting=not arguments.devices)
    if not chosen:
        raise ConfigError(
            "There is no layout to compare with one device. Use two devices or more, for example --devices 2,4; "
            "hybrid needs 4, 6, 8 and so on."
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        start = partial(run_job, config, arguments.steps)
        others = {each.label: each for each in chosen}
        comparisons = compare_all(start, REFERENCE, others, Path(folder), stop_after)
    _show(comparisons, arguments)
    unproven = [each for each in comparisons if each.trace.refused]
    failed = any(each.is_broken for each in comparisons) or len(unproven) == len(chosen)
    return EXIT_DIFFERENT if failed or (names and unproven) else EXIT_DONE


def _verify_script(arguments: argparse.Namespace, stop_after: int) -> int:
    """The same for a script: returns 1 where a run did not end, or differs from one process by more than rounding."""
    target, threads = _script(arguments)
    counts = [count for count in device_counts(arguments.devices) or DEVICES if count > 1]
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        start = partial(run_script, target, arguments.steps, threads)
        others = {plural(count, "process"): count for count in counts}
        comparisons = compare_all(start, 1, others, Path(folder), stop_after)
    _show(comparisons, arguments)
    failed = any(each.is_broken or each.trace.refused for each in comparisons)
    return EXIT_DIFFERENT if failed else EXIT_DONE


def _stop_after(arguments: argparse.Namespace) -> int:
    """The number of steps after which to stop; 0 for none."""
    given = arguments.stop_after
    if not given:
        return 0
    if arguments.micro_batches:
        raise ConfigError("--micro-batches computes one step on one device; leave out --stop-after.")
    if not given.isdecimal() or not 0 < int(given) < arguments.steps:
        raise ConfigError(
            f"--stop-after is {given}, and must be a number from 1 to {arguments.steps - 1}, less than --steps."
        )
    return int(given)


def _script(arguments: argparse.Namespace) -> tuple[ScriptTarget, int | None]:
    """The script and its number of threads. Raises ``ConfigError`` for options that are for jobs."""
    if arguments.job:
        raise ConfigError(f"The job {arguments.job!r} and a script were given. Verify one of them at a time.")
    for name in ("strategies", "set", "data", "precision"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for jobs. Pass a script its own arguments, after its name.")
    if not arguments.script:
        raise ConfigError("--script needs a script: lockstep verify --script train.py.")
    threads = arguments.threads
    if threads is not None and not threads.isdecimal():
        raise ConfigError(f"--threads {threads!r} is not a number.")
    return ScriptTarget.from_words(arguments.script), threads and int(threads)


def _verify_micro_batches(arguments: argparse.Namespace) -> int:
    """Compares the first step in several numbers of micro-batches; returns 1 where another one is trained."""
    given = arguments.micro_batches
    counts = sorted({int(word) for word in comma_separated(given) if word.isdecimal()})
    if len(counts) != len(comma_separated(given)) or len(counts) < 2 or counts[0] < 1:
        raise ConfigError(f"--micro-batches {given!r} is not a list of two or more numbers: use for example 1,8.")
    for name in ("devices", "strategies"):
        if getattr(arguments, name):
            raise ConfigError(f"--micro-batches computes one step on one device; leave out --{name}.")
    payload: dict[str, Any]
    if arguments.script is not None:
        target, threads = _script(arguments)
        payload = {"script": dataclasses.asdict(target)}
    else:
        config = REFERENCE.of(job_on_one_device(arguments.job or "digits", arguments), "verify")
        payload, threads = {"config": config.to_json()}, config.run.threads
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:

        @cache
        def computed(count: int, variant: str = AS_IT_IS) -> FirstStep:
            print(f"computing {plural(count, 'micro-batch')}, {variant}", file=sys.stderr)
            place = Path(folder) / f"{count}-{VARIANTS.index(variant)}"
            return micro_batches.first_step({**payload, "micro_batches": count, "variant": variant}, threads, place)

        findings = compared([computed(count) for count in counts], computed)
    print(micro_batches.table(findings))
    if arguments.json:
        write_file(arguments.json, micro_batches.as_json(findings))
    ran = [each for each in findings if not each.step.refused]
    if len(ran) < 2 and not any(each.step.in_training for each in findings):
        raise ConfigError("There was nothing to compare: fewer than two numbers of micro-batches were computed.")
    return EXIT_DIFFERENT if any(each.is_mistake for each in findings) else EXIT_DONE


def _show(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> None:
    print(table(comparisons))
    if arguments.json:
        write_file(arguments.json, as_json(comparisons))
