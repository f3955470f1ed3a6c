"""``lockstep verify``: compares a job in several layouts, or a script on several numbers of processes, with one device.

The table says for each whether it is equal bit for bit, and if not, in which step and why it differs first. With
``--stop-after`` each is also stopped, and resumed in the next one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, add_train_options, require_at_least, require_files, write_file
from lockstep.cli.train import device_counts, job_on_one_device, strategy_names
from lockstep.config.job import JobConfig
from lockstep.config.strategy_options import STRATEGIES
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import ScriptTarget
from lockstep.launch.supervisor import run_sequentially
from lockstep.text import comma_separated, plural
from lockstep.verify import micro_batches
from lockstep.verify.layouts import DEVICES, REFERENCE, RUN_FOLDER, Layout, layouts, reason_of, run_layout
from lockstep.verify.micro_batches import AS_IT_IS, VARIANTS, FirstStep, compared
from lockstep.verify.plain.diagnosis import compare_plain, trace_of
from lockstep.verify.plain.record import Recording
from lockstep.verify.report import Comparison, as_json, compare, is_enlarged, largest_difference, table
from lockstep.verify.trace import FINAL, Trace, refusal

_NUDGES = 16
"""Runs that look for what rounding can do, each of one device."""
ENTRY = "lockstep.verify.rank:main"
MICRO_BATCHES_ENTRY = "lockstep.verify.rank:watch_micro_batches"
SCRIPT_ENTRY = "lockstep.verify.rank:watch_script"
EXIT_DIFFERENT = 1
L = TypeVar("L")


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
        start = partial(_run_job, config, arguments.steps)
        others = {each.label: each for each in chosen}
        comparisons = _compare_all(start, REFERENCE, others, Path(folder), stop_after)
    _show(comparisons, arguments)
    unproven = [each for each in comparisons if each.trace.refused]
    failed = any(each.is_broken for each in comparisons) or len(unproven) == len(chosen)
    return EXIT_DIFFERENT if failed or (names and unproven) else EXIT_DONE


def _verify_script(arguments: argparse.Namespace, stop_after: int) -> int:
    """The same for a script: returns 1 where a run did not end, or differs from one process by more than rounding."""
    target, threads = _script(arguments)
    counts = [count for count in device_counts(arguments.devices) or DEVICES if count > 1]
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        start = partial(_run_script, target, arguments.steps, threads)
        others = {plural(count, "process"): count for count in counts}
        comparisons = _compare_all(start, 1, others, Path(folder), stop_after)
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
            return _first_step({**payload, "micro_batches": count, "variant": variant}, threads, place)

        findings = compared([computed(count) for count in counts], computed)
    print(micro_batches.table(findings))
    if arguments.json:
        write_file(arguments.json, micro_batches.as_json(findings))
    ran = [each for each in findings if not each.step.refused]
    if len(ran) < 2 and not any(each.step.in_training for each in findings):
        raise ConfigError("There was nothing to compare: fewer than two numbers of micro-batches were computed.")
    return EXIT_DIFFERENT if any(each.is_mistake for each in findings) else EXIT_DONE


def _first_step(payload: dict[str, Any], threads: int | None, folder: Path) -> FirstStep:
    folder.mkdir()
    outcome = run_sequentially(MICRO_BATCHES_ENTRY, payload, ranks=1, threads=threads, folder=folder)
    if (folder / "step.json").exists():
        return FirstStep.read(folder / "step.json")
    sentence, reason = refusal(folder), reason_of(outcome.lines)
    if outcome.code == EXIT_DONE:
        reason = "it made no step with lockstep.init and run.backward"
    return FirstStep(payload["micro_batches"], refused=sentence or reason, in_training=bool(sentence))


def _show(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> None:
    print(table(comparisons))
    if arguments.json:
        write_file(arguments.json, as_json(comparisons))


@dataclass(frozen=True)
class How:
    """Options of a run beside its layout."""

    nudge: int = 0
    """The number of a change in last places, or 0."""
    stop_after: int = 0
    """Steps after which it saves and stops, or 0."""
    resume: Path | None = None
    """The folder of a run that has stopped, from which it resumes."""

    @property
    def payload(self) -> dict[str, int]:
        """For the entry of the ranks."""
        return {"nudge": self.nudge, "stop_after": self.stop_after}


@dataclass(frozen=True)
class Ran:
    """A run of a job in one layout, or of a script on one number of processes."""

    trace: Trace
    """Of a loop on ``lockstep.init``; of any other only the label, and the reason why it did not run."""
    folder: Path
    records: Recording | None = None
    """Of a script's loop with a ``Recorder``."""


def _compare_all(
    start: Callable[[L, Path, How], Ran], one: L, others: Mapping[str, L], folder: Path, stop_after: int
) -> list[Comparison]:
    """Compares runs, by their labels, with that of one device. Raises ``ConfigError`` where one device fails.

    ``start`` is given the layout, a folder, and further options. ``stop_after``: see ``How``.
    """
    judge = _Judge(partial(start, one), folder)
    reference = judge.reference
    if reference.trace.in_training:
        return [Comparison(reference.trace, "")]
    if reference.trace.refused:
        raise ConfigError(reference.trace.refused)
    if stop_after and reference.records is not None:
        raise ConfigError("--stop-after is for loops on lockstep.init, whose runs can be resumed.")
    if stop_after and stop_after >= (made := reference.trace.steps[-1].step + 1):
        raise ConfigError(
            f"--stop-after is {stop_after}, and the run has {plural(made, 'step')}. Give a smaller number."
        )
    first, records = reference.trace, reference.records
    if records is not None:
        first = trace_of(records, first.label)
    comparisons = [Comparison(first, "A")]
    for number, (label, layout) in enumerate(others.items()):
        print(f"running {label} ({number + 1} of {len(others)})", file=sys.stderr)
        comparisons.append(judge.compare(start(layout, folder / str(number), How())))
    if stop_after:
        proven = [each.trace for each in comparisons if not (each.trace.refused or each.trace.independent)]
        every = {first.label: one, **others}
        resumed = _resumed(start, {each.label: every[each.label] for each in proven}, folder, stop_after)
        comparisons += [judge.compare(ran, since=ran.trace.first) for ran in resumed]
    return comparisons


class _Judge:
    """Compares runs with that of one device, and repeats the latter where that may explain a difference.

    Args:
        start: runs one device, in a folder and with further options.
        folder: gets the folders of its runs.
    """

    def __init__(self, start: Callable[[Path, How], Ran], folder: Path) -> None:
        self._start, self._folder = start, folder
        self._moves: list[float] = []
        self.reference = start(folder / "reference", How())

    @cached_property
    def _again(self) -> Ran:
        """One device a second time, which shows operators that are not deterministic."""
        return self._start(self._folder / "again", How())

    def _moved(self, number: int) -> float:
        """How far one device moves that rounds otherwise."""
        nudged = self._start(self._folder / f"nudged-{number}", How(nudge=number))
        if nudged.trace.refused:
            raise ConfigError(nudged.trace.refused)
        return largest_difference(self.reference.folder / FINAL, nudged.folder / FINAL)

    def _sensitivity(self, gap: float) -> float:
        """The most of several changes, until they explain a gap: a step may turn on a single value that is nearly 0."""
        for number in range(1, _NUDGES + 1):
            if number > len(self._moves):
                self._moves.append(self._moved(number))
            if is_enlarged(gap, max(self._moves[:number])):
                break
        return max(self._moves[:number])

    def compare(self, other: Ran, since: int | None = None) -> Comparison:
        """Compares a run, ``since`` the step in which it begins."""
        if other.trace.refused:
            return Comparison(other.trace, "")
        if self.reference.records is not None or other.records is not None:
            mine, theirs = _records(self.reference), _records(other)
            return compare_plain(mine, theirs, other.trace.label, again=_records(self._again))
        expected = self.reference.trace if since is None else self.reference.trace.since(since)
        gap = largest_difference(self.reference.folder / FINAL, other.folder / FINAL)
        found = compare(expected, other.trace, gap)
        if found.diagnosis is None or self._again.trace.refused:
            return found
        repeats = compare(expected, self._again.trace.since(expected.first), 0.0).diagnosis is None
        moves = self._sensitivity(gap) if found.needs_sensitivity else None
        return compare(expected, other.trace, gap, repeats=repeats, sensitivity=moves)


def _resumed(
    start: Callable[[L, Path, How], Ran], layouts: Mapping[str, L], folder: Path, stop_after: int
) -> Iterator[Ran]:
    """Runs that are stopped in each layout and resumed in the one after it, as the first after the last."""
    for number, (first, second) in enumerate(zip(layouts, [*layouts, *layouts][1:])):
        label = f"{first}, then {second}"
        print(f"running {label} ({number + 1} of {len(layouts)})", file=sys.stderr)
        place = folder / f"stopped-{number}"
        ran = start(layouts[first], place, How(stop_after=stop_after))
        level = ran.trace.level
        if not ran.trace.refused:
            ran = start(layouts[second], folder / f"resumed-{number}", How(resume=place / RUN_FOLDER))
        refused = bool(ran.trace.refused)
        highest = max(level, ran.trace.level)
        trace = dataclasses.replace(ran.trace, label=label, level=highest, in_training=refused)
        yield dataclasses.replace(ran, trace=trace)


def _run_job(config: JobConfig, steps: int, layout: Layout, folder: Path, how: How) -> Ran:
    trace, resume = folder / "trace.json", str(how.resume or "")
    reason = run_layout(layout, config, ENTRY, folder, resume=resume, steps=steps, label=layout.label, **how.payload)
    if not reason and trace.exists():
        return Ran(Trace.read(trace), folder)
    sentence = refusal(folder) if folder.exists() else ""
    reason = sentence or reason or "its ranks recorded no step"
    refused = Trace(layout.label, layout.strategy, layout.ranks, "", refused=reason, in_training=bool(sentence))
    return Ran(refused, folder)


def _run_script(target: ScriptTarget, steps: int, threads: int | None, count: int, folder: Path, how: How) -> Ran:
    folder.mkdir()
    label = plural(count, "process")
    payload = {
        "script": dataclasses.asdict(target),
        "steps": steps,
        "label": label,
        "resume": str(how.resume or ""),
        **how.payload,
    }
    outcome = run_sequentially(SCRIPT_ENTRY, payload, ranks=count, threads=threads, folder=folder)
    if outcome.code == EXIT_DONE and (folder / "trace.json").exists():
        return Ran(Trace.read(folder / "trace.json"), folder)
    trace = Trace(label, "", count, "")
    if outcome.code == EXIT_DONE and any((folder / "records").glob("rank-*.jsonl")):
        return Ran(trace, folder, Recording.read(folder / "records"))
    if sentence := refusal(folder):
        return Ran(dataclasses.replace(trace, refused=sentence, in_training=True), folder)
    reason = (
        f"{target.path} finished no step that was recorded. Train with lockstep.init and its run.batches, or call "
        "recorder.step() of a lockstep.verify.Recorder after each step."
    )
    if outcome.code != EXIT_DONE:
        report = [line for line in outcome.lines if not line.startswith("Logs: ")]
        print(*report, sep="\n", file=sys.stderr)
        reason = reason_of(outcome.lines) or f"exit code {outcome.code}"
    return Ran(dataclasses.replace(trace, refused=reason), folder)


def _records(ran: Ran) -> Recording:
    if ran.records is None:
        raise ConfigError(
            f"On {ran.trace.label} the script trained with lockstep.init, on others with a Recorder. Use the same on "
            "every number of processes."
        )
    return ran.records
