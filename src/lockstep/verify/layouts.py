"""The layouts of a job that are compared, the run of a job or script in each, and their comparison with one device.

``compare_all`` repeats the run of one device where that may explain a difference: once as it was, to see whether its
operators repeat their bits, and with changes in last places, to see how far rounding alone moves the model.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.job import JobConfig
from lockstep.config.rules import machine_problems
from lockstep.config.strategy_options import ONE_PROCESS, STRATEGIES
from lockstep.core.mesh import HYBRIDS, Mesh
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import ScriptTarget
from lockstep.launch.supervisor import run_sequentially
from lockstep.text import plural
from lockstep.verify.diagnosis import Comparison, compare, is_enlarged, largest_difference
from lockstep.verify.plain.diagnosis import compare_plain, trace_of
from lockstep.verify.plain.record import Recording
from lockstep.verify.trace import FINAL, Trace, refusal

DEVICES = (1, 2, 4)
"""Default numbers of devices; those above the recipe's micro-batches are left out."""
RUN_FOLDER = "run"
"""Where a run that verify observes writes to, in verify's own folder."""


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of devices."""

    strategy: str
    devices: int
    mesh: str = ""
    mode: str = ""
    """Of strategy parameter_server; empty for synchronous."""

    @property
    def label(self) -> str:
        """As in ``ddp on 4``."""
        mode = f" ({self.mode})" if self.mode else ""
        return f"{self.mesh or self.strategy}{mode} on {self.devices}"

    @property
    def ranks(self) -> int:
        """The number of processes."""
        if self.mesh:
            return Mesh.parse(self.mesh).ranks
        return 1 if self.strategy in ONE_PROCESS else self.devices

    def of(self, config: JobConfig, directory: str, resume: str = "") -> JobConfig:
        """The job in this layout, which writes only into ``directory``, and resumes from the run folder ``resume``."""
        changed: dict[str, dict[str, Any]] = {
            "training": {"strategy": self.strategy, "mesh": self.mesh},
            "run": {"devices": f"cpu:{self.devices}", "directory": directory, "name": RUN_FOLDER},
            "log": {"tensorboard": False, "json": False, "progress": False},
            "checkpoint": {"resume": resume},
            "parameter_server": {"mode": self.mode or "synchronous"},
        }
        if (option := ONE_PROCESS.get(self.strategy)) is not None:
            changed[self.strategy] = {option: self.devices}
        parts = {name: dataclasses.replace(getattr(config, name), **new) for name, new in changed.items()}
        return dataclasses.replace(config, **parts)


REFERENCE = Layout("single", 1)


def layouts(
    config: JobConfig, devices: Iterable[int], strategies: Sequence[str], *, fitting: bool = True
) -> list[Layout]:
    """The layouts to compare with ``REFERENCE``, of some strategies (all if empty) on numbers of devices.

    ``fitting`` leaves out numbers of devices above the recipe's micro-batches.
    """
    found = []
    for count in devices:
        if fitting and count > config.training.micro_batches:
            continue
        for strategy in strategies or STRATEGIES:
            if strategy in ("single", "hybrid") or (count == 1 and strategy != "ddp"):
                continue
            found.append(Layout(strategy, count))
            if strategy == "parameter_server":
                found.append(Layout(strategy, count, mode="asynchronous"))
        if count >= 4 and count % 2 == 0 and (not strategies or "hybrid" in strategies):
            found += [Layout("hybrid", count, f"{first}=2,{second}={count // 2}") for first, second in HYBRIDS]
    return found


def run_layout(
    layout: Layout, config: JobConfig, entry: str, folder: Path, *, resume: str = "", **payload: int | str
) -> str:
    """Runs an entry on the layout's ranks and returns the reason of a failure, or an empty text.

    Args:
        layout: the layout.
        config: the job.
        entry: ``module:function``, called with ``payload``, the ``config`` and the ``folder``.
        folder: created for the files of the ranks.
        resume: see ``Layout.of``.
        payload: further arguments of the entry.
    """
    folder.mkdir()
    job = layout.of(config, str(folder), resume)
    if problems := machine_problems(job, layout.devices, "cpu"):
        return " ".join(problem.text for problem in problems)
    given = {"config": job.to_json(), **payload}
    outcome = run_sequentially(
        entry,
        given,
        ranks=layout.ranks,
        threads=job.run.threads,
        portable=bool(job.training.portable),
        folder=folder,
    )
    if outcome.code == EXIT_DONE:
        return ""
    return reason_of(outcome.lines) or f"exit code {outcome.code}"


def reason_of(report: Sequence[str]) -> str:
    """Shortens the report of a failed run to one line: the rank, and the error without its notes."""
    first = report[0] if report else ""
    if not first.endswith(":"):
        return first
    calls = [number for number, line in enumerate(report) if line.startswith("  File ")]
    below = report[calls[-1] + 1 :] if calls else report[1:]
    error = next((line for line in below if line and not line.startswith((" ", "Logs: "))), "")
    return f"{first} {error}" if error else first


_JOB, _SCRIPT = "lockstep.verify.rank:main", "lockstep.verify.rank:watch_script"
_NUDGES = 16
"""Runs that look for what rounding can do, each of one device."""
L = TypeVar("L")


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


def compare_all(
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


def run_job(config: JobConfig, steps: int, layout: Layout, folder: Path, how: How) -> Ran:
    """Runs some steps of a job in a layout, observed; its files go to ``folder``."""
    trace, resume = folder / "trace.json", str(how.resume or "")
    reason = run_layout(layout, config, _JOB, folder, resume=resume, steps=steps, label=layout.label, **how.payload)
    if not reason and trace.exists():
        return Ran(Trace.read(trace), folder)
    sentence = refusal(folder) if folder.exists() else ""
    reason = sentence or reason or "its ranks recorded no step"
    refused = Trace(layout.label, layout.strategy, layout.ranks, "", refused=reason, in_training=bool(sentence))
    return Ran(refused, folder)


def run_script(target: ScriptTarget, steps: int, threads: int | None, count: int, folder: Path, how: How) -> Ran:
    """Runs some steps of a script on ``count`` processes, observed; its files go to ``folder``."""
    folder.mkdir()
    label = plural(count, "process")
    payload = {
        "script": dataclasses.asdict(target),
        "steps": steps,
        "label": label,
        "resume": str(how.resume or ""),
        **how.payload,
    }
    outcome = run_sequentially(_SCRIPT, payload, ranks=count, threads=threads, folder=folder)
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
