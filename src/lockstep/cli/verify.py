"""``lockstep verify``: compares a job in several layouts, or a script on several numbers of processes, with one device.

The table says for each whether it is equal bit for bit, and if not, in which step and why it differs first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, add_train_options
from lockstep.cli.train import device_counts, job_on_one_device, strategy_names
from lockstep.config.job import JobConfig
from lockstep.config.strategy_options import STRATEGIES
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import ScriptTarget
from lockstep.launch.supervisor import run_sequentially
from lockstep.verify.layouts import DEVICES, REFERENCE, Layout, layouts, run_layout
from lockstep.verify.plain.diagnosis import compare_plain, trace_of
from lockstep.verify.plain.record import Recording
from lockstep.verify.report import Comparison, as_json, compare, table
from lockstep.verify.trace import Trace

ENTRY = "lockstep.verify.rank:main"
SCRIPT_ENTRY = "lockstep.verify.rank:watch_script"
EXIT_DIFFERENT = 1


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "job", metavar="JOB", nargs="?", default="", help="a TOML file, or a built-in job (default: digits)"
    )
    add_options(
        parser,
        ("--devices", "N,N", "", "numbers of CPU devices to compare (default: 1,2,4)"),
        ("--strategies", "A,B", "", f"some of {', '.join(STRATEGIES)} (default: all)"),
        ("--steps", "N", 12, "optimizer steps of each run"),
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
        1 if a layout breaks its promise, if one whose strategy was given did not run, or if none ran; else 0.
    """
    if arguments.steps < 1:
        raise ConfigError(f"--steps is {arguments.steps}, and must be at least 1.")
    if arguments.script is not None:
        return _verify_script(arguments)
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
        comparisons = _compare_all(config, chosen, arguments.steps, Path(folder))
    _show(comparisons, arguments)
    unproven = [each for each in comparisons if each.trace.refused]
    failed = any(each.is_broken for each in comparisons) or len(unproven) == len(chosen)
    return EXIT_DIFFERENT if failed or (names and unproven) else EXIT_DONE


def _verify_script(arguments: argparse.Namespace) -> int:
    """The same for a script: returns 1 where a run differs from one process by more than rounding."""
    if arguments.job:
        raise ConfigError(f"The job {arguments.job!r} and a script were given. Verify one of them at a time.")
    for name in ("strategies", "set", "data", "precision"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for jobs. Pass a script its own arguments, after its name.")
    if not arguments.script:
        raise ConfigError("--script needs a script: lockstep verify --script train.py.")
    target = ScriptTarget(path=arguments.script[0], arguments=tuple(arguments.script[1:]))
    worlds = [count for count in device_counts(arguments.devices) or DEVICES if count > 1]
    threads = arguments.threads
    if threads is not None and not threads.isdecimal():
        raise ConfigError(f"--threads {threads!r} is not a number.")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        runs = ScriptRuns(target, arguments.steps, threads and int(threads), Path(folder))
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
    """The trace of one layout; where the job cannot run in it, the trace has the reason."""
    trace = folder / "trace.json"
    reason = run_layout(layout, config, ENTRY, folder, steps=steps, label=layout.label)
    if not reason and trace.exists():
        return Trace.read(trace)
    reason = reason or "its ranks recorded no step"
    return Trace(layout.label, layout.strategy, layout.ranks, "", refused=reason)


@dataclass(frozen=True)
class ScriptRun:
    """The records of a script on one number of processes."""

    label: str
    folder: Path
    trace: Trace | None = None
    """Of a loop on ``lockstep.init``."""
    records: Recording | None = None
    """Of a loop with a ``Recorder``."""
    refused: str = ""


@dataclass(frozen=True)
class ScriptRuns:
    """Runs one script on different numbers of CPU processes."""

    target: ScriptTarget
    steps: int
    threads: int | None
    folder: Path

    def compare(self, worlds: Sequence[int]) -> list[Comparison]:
        """Runs the script on one process and on each number of them. Raises ``ConfigError`` where one process fails."""
        reference = self._run(1, "reference")
        if reference.refused:
            raise ConfigError(reference.refused)
        first = reference.trace or trace_of(_records(reference), reference.label)
        comparisons = [Comparison(first, "A")]
        for count in worlds:
            print(f"running {_label(count)}", file=sys.stderr)
            comparisons.append(self._judge(reference, self._run(count, str(count)), count))
        return comparisons

    @cached_property
    def _again(self) -> ScriptRun:
        """One process a second time, which shows operators that are not deterministic."""
        return self._run(1, "again")

    def _judge(self, reference: ScriptRun, other: ScriptRun, count: int) -> Comparison:
        if other.refused:
            return Comparison(Trace(other.label, "", count, "", refused=other.refused), "")
        if reference.trace is None or other.trace is None:
            return compare_plain(
                _records(reference), _records(other), other.label, again=_records(self._again)
            )
        gap = _difference(reference.folder, other.folder)
        found = compare(reference.trace, other.trace, gap)
        if found.diagnosis is None or self._again.trace is None:
            return found
        repeats = compare(reference.trace, self._again.trace, 0.0).diagnosis is None
        return compare(reference.trace, other.trace, gap, repeats=repeats)

    def _run(self, count: int, name: str) -> ScriptRun:
        here, label = self.folder / name, _label(count)
        here.mkdir()
        payload = {
            "script": self.target.path,
            "arguments": list(self.target.arguments),
            "steps": self.steps,
            "label": label,
        }
        outcome = run_sequentially(SCRIPT_ENTRY, payload, ranks=count, threads=self.threads, folder=here)
        if outcome.code != EXIT_DONE:
            report = [line for line in outcome.lines if not line.startswith("Logs: ")]
            print(*report, sep="\n", file=sys.stderr)
            return ScriptRun(label, here, refused=_reason(outcome.lines) or f"exit code {outcome.code}")
        if (here / "trace.json").exists():
            return ScriptRun(label, here, trace=Trace.read(here / "trace.json"))
        if any((here / "records").glob("rank-*.jsonl")):
            return ScriptRun(label, here, records=Recording.read(here / "records"))
        return ScriptRun(
            label,
            here,
            refused=f"{self.target.path} finished no step that was recorded. Train with lockstep.init and its "
            "run.batches, or call recorder.step() of a lockstep.verify.Recorder after each step.",
        )


def _records(ran: ScriptRun) -> Recording:
    if ran.records is None:
        raise ConfigError(
            f"On {ran.label} the script trained with lockstep.init, on others with a Recorder. Use the same on every "
            "number of processes."
        )
    return ran.records


def _reason(report: Sequence[str]) -> str:
    """Shortens the report of a failed run to one line: the rank, and the last line of the traceback."""
    first = report[0] if report else ""
    if not first.endswith(":"):
        return first
    rest = [line for line in report[1:] if not line.startswith((" ", "Logs: "))]
    return f"{first} {rest[-1]}" if rest else first


def _label(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _difference(reference: Path, other: Path) -> float:
    """The largest relative difference of a tensor between the last parameters of two runs."""
    import torch
    from safetensors.torch import load_file

    mine, theirs = (load_file(str(folder / "final.safetensors")) for folder in (reference, other))
    worst = 0.0
    for name, tensor in mine.items():
        gap = float((theirs[name].double() - tensor.double()).norm())
        worst = max(worst, gap / max(float(tensor.double().norm()), torch.finfo(torch.float32).tiny))
    return worst
