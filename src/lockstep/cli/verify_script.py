"""``lockstep verify --script``: runs a user's own script on several numbers of processes and compares what they did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch import ScriptTarget
from lockstep.launch.in_turn import run_in_turn
from lockstep.verify.comparison import Comparison, compare
from lockstep.verify.plain.comparison import compare_plain, trace_of
from lockstep.verify.plain.record import Recording
from lockstep.verify.trace import Trace

ENTRY = "lockstep.verify.script:main"


@dataclass(frozen=True)
class Ran:
    """What a script left behind on one number of processes."""

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
    difference: Callable[[Path, Path], float]
    """Gives the largest relative difference of two runs' last parameters."""

    def compare(self, worlds: Sequence[int]) -> list[Comparison]:
        """The script on one process, then on each number of them; ``ConfigError`` where one process fails."""
        reference = self._run(1, "reference")
        if reference.refused:
            raise ConfigError(reference.refused)
        first = reference.trace or trace_of(_known(reference), reference.label)
        comparisons = [Comparison(first, "A")]
        for count in worlds:
            print(f"running {_label(count)}", file=sys.stderr)
            comparisons.append(self._judge(reference, self._run(count, str(count)), count))
        return comparisons

    @cached_property
    def _again(self) -> Ran:
        """One process a second time, which tells operators that do not repeat themselves."""
        return self._run(1, "again")

    def _judge(self, reference: Ran, other: Ran, count: int) -> Comparison:
        if other.refused:
            return Comparison(Trace(other.label, "", count, "", refused=other.refused), "")
        if reference.trace is None or other.trace is None:
            return compare_plain(_known(reference), _known(other), other.label, again=_known(self._again))
        gap = self.difference(reference.folder, other.folder)
        found = compare(reference.trace, other.trace, gap)
        if found.diagnosis is None or self._again.trace is None:
            return found
        repeats = compare(reference.trace, self._again.trace, 0.0).diagnosis is None
        return compare(reference.trace, other.trace, gap, repeats=repeats)

    def _run(self, count: int, name: str) -> Ran:
        here, label = self.folder / name, _label(count)
        here.mkdir()
        payload = {
            "script": self.target.path,
            "arguments": list(self.target.arguments),
            "steps": self.steps,
            "label": label,
        }
        outcome = run_in_turn(ENTRY, payload, ranks=count, threads=self.threads, folder=here)
        if outcome.code != EXIT_DONE:
            report = [line for line in outcome.lines if not line.startswith("Logs: ")]
            print(*report, sep="\n", file=sys.stderr)
            return Ran(label, here, refused=_reason(outcome.lines) or f"exit code {outcome.code}")
        if (here / "trace.json").exists():
            return Ran(label, here, trace=Trace.read(here / "trace.json"))
        if any((here / "records").glob("rank-*.jsonl")):
            return Ran(label, here, records=Recording.read(here / "records"))
        return Ran(
            label,
            here,
            refused=f"{self.target.path} finished no step that was observed. Train with lockstep.init and its "
            "run.batches, or call recorder.step() of a lockstep.verify.Recorder after each step.",
        )


def _known(ran: Ran) -> Recording:
    if ran.records is None:
        raise ConfigError(
            f"On {ran.label} the script trained with lockstep.init and elsewhere with a Recorder. Let it do the same "
            "on every number of processes."
        )
    return ran.records


def _reason(report: Sequence[str]) -> str:
    """The report of a failed run in a line: who failed, and the last line of the traceback."""
    first = report[0] if report else ""
    if not first.endswith(":"):
        return first
    rest = [line for line in report[1:] if not line.startswith((" ", "Logs: "))]
    return f"{first} {rest[-1]}" if rest else first


def _label(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
