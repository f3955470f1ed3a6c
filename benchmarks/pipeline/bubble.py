"""The bubble of each schedule, measured and drawn against theory.

``python benchmarks/pipeline/bubble.py`` writes BUBBLE.md and two drawings; ``--quick`` is a few steps, nothing written.
It needs a core for each rank: give ``--ranks`` at most as many as the machine has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import drawing  # noqa: E402  beside this file
from harness import report  # noqa: E402  the line above makes it importable
from harness.commands import environment, lockstep_run  # noqa: E402

from lockstep.strategies.pipeline.schedule import Action, bubble, order_of, timeline, waiting  # noqa: E402

CLAIM = (
    "The time in which the ranks of a pipeline do not compute falls with more micro-batches and with the interleaved "
    "schedule, as theory says, (S - 1) / (S - 1 + V M) with S ranks, V stages on each and M micro-batches. It is "
    "larger than theory. Uneven passes add to it, and what happens between passes: sending, receiving, and adding "
    "gradients in order."
)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages per rank of each schedule."""
WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """One schedule with one number of micro-batches."""

    schedule: str
    count: int
    waiting: list[float]
    """Part of the time that ranks waited, of each step."""
    expected: float
    simulated: float
    """The timing that the order leads to if every pass takes as long as it did, and nothing happens between passes."""
    spans: list[list[tuple[str, float, float]]]
    """The passes of each rank in the step whose waiting is the median."""


def main() -> None:
    given = read_command_line()
    found = [
        measure(schedule, count, given)
        for schedule in SCHEDULES
        for count in (given.ranks, 2 * given.ranks, 4 * given.ranks)
    ]
    section = table(found, given.ranks)
    print(section)
    if given.quick:
        return
    (HERE / "timeline.svg").write_text(drawing.timelines([each for each in found if each.count == 2 * given.ranks]))
    (HERE / "bubble.svg").write_text(drawing.bubbles(found, given.ranks))
    report.write(
        HERE / "BUBBLE.md",
        title="The bubble of a pipeline",
        claim=CLAIM,
        sections=[section, "![passes over time](timeline.svg)", "![measured and theory](bubble.svg)"],
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="processes, at most one a core (default: 2)")
    parser.add_argument("--steps", type=int, default=40, help="of each pipeline (default: 40)")
    parser.add_argument("--quick", action="store_true", help="a few steps, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.steps = WARM_UP + 3
    return given


def measure(schedule: str, count: int, given: argparse.Namespace) -> Measured:
    """Runs one pipeline and reads what its ranks wrote."""
    per_rank = SCHEDULES[schedule]
    with tempfile.TemporaryDirectory(prefix="bubble-") as folder:
        arguments = {
            "schedule": schedule,
            "count": count,
            "stages": given.ranks * per_rank,
            "per-rank": per_rank,
            "steps": given.steps,
            "output": folder,
        }
        told = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        command = lockstep_run(given.ranks, HERE / "sides" / "spans.py", *told)
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(given.ranks)]
        ranks = [json.loads(file.read_text())[WARM_UP:] for file in files]
    steps = list(zip(*ranks))
    parts = [waited(step) for step in steps]
    middle = sorted(range(len(steps)), key=parts.__getitem__)[len(steps) // 2]
    orders = [order_of(schedule, rank, given.ranks, per_rank, count) for rank in range(given.ranks)]
    simulated = statistics.median(unhindered(step, orders) for step in steps)
    expected = bubble(given.ranks, per_rank, count)
    return Measured(schedule, count, parts, expected, simulated, [list(rank) for rank in steps[middle]])


def waited(step: tuple[list[tuple[str, float, float]], ...]) -> float:
    """The part of a step, from its first pass to its last, in which ranks did not compute."""
    every = [span for rank in step for span in rank]
    length = max(stop for _, _, stop in every) - min(start for _, start, _ in every)
    return 1 - sum(stop - start for _, start, stop in every) / (length * len(step))


def unhindered(step: tuple[list[tuple[str, float, float]], ...], orders: list[tuple[Action, ...]]) -> float:
    """The part of a step in which ranks would wait for each other's passes alone."""
    took = {
        action: stop - start
        for order, spans in zip(orders, step, strict=True)
        for action, (_, start, stop) in zip(order, spans, strict=True)
    }
    return waiting(timeline(orders, took.__getitem__))


def table(found: list[Measured], ranks: int) -> str:
    """Measured against theory."""
    rows = [
        [
            each.schedule,
            str(each.count),
            f"{100 * each.expected:.1f} %",
            f"{100 * each.simulated:.1f} %",
            f"{100 * statistics.median(each.waiting):.1f} % "
            f"({100 * min(each.waiting):.1f}–{100 * max(each.waiting):.1f})",
        ]
        for each in found
    ]
    head = ["schedule", "micro-batches", "theory", "with the passes as long as measured", "measured (range)"]
    return f"## {ranks} ranks, {len(found[0].waiting)} steps each\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    main()
