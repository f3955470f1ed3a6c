"""The cost for a step of heartbeat and watchdog: every rank says what it does, and is watched.

``python benchmarks/heartbeat/run.py`` writes RESULTS.md; ``--quick`` is a few short rounds, nothing written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402  the line above makes the harness importable
from harness import report  # noqa: E402
from harness.commands import environment, lockstep_run  # noqa: E402
from harness.spread import Spread  # noqa: E402

from lockstep.core.world import World  # noqa: E402
from lockstep.launch import Heartbeat  # noqa: E402
from lockstep.runtime.heartbeat import FORWARD  # noqa: E402

CLAIM = (
    "Heartbeat and watchdog take less than 0.5 % of a step, also of a perceptron's on 8 x 8 digits, whose "
    "micro-batches take a third of a millisecond."
)
CALLS = ("begin_step", "enter", "await_data")
WITH, WITHOUT = "heartbeat", "no heartbeat"
WORKLOADS = {
    "digits": (200, "perceptron 64-256-128-10, 128 digits a step"),
    "resnet": (4, "ResNet-18, 32 images of 64 x 64 a step"),
}
"""Steps of a round, and what is trained."""
PROCESSES = 2
LIMIT = 300.0
"""Seconds that one workload may take."""
CALLS_IN_A_ROUND = 20_000


@dataclass(frozen=True)
class Measured:
    """One workload, over both ranks."""

    steps: dict[str, list[float]]
    """Milliseconds per step of each round by the slowest rank's clock, with and without."""
    on_core: dict[str, list[float]]
    """The same, of the time that the training threads were on a core: it hangs less on what else the machine does."""
    calls: dict[str, float]
    """Calls of a rank in a step; of the rank that makes most."""
    microseconds: dict[str, float]
    """Of one call within a step, the median of the slower rank."""
    supervisor: float
    """Percent of one core that the process which watches takes."""


def main() -> None:
    given = read_command_line()
    costs = call_costs(given.alternations)
    measured = {name: train(name, given) for name in given.workloads}
    sections = [costs_section(costs), steps_section(measured)]
    print("\n\n".join(sections))
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="What heartbeat and watchdog cost",
            claim=CLAIM,
            sections=[*sections, report.LEGEND],
        )


def call_costs(alternations: int) -> dict[str, Spread]:
    """Microseconds of one call, each round less the loop around it, which is timed in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, run_directory=folder)
        heartbeat, indices = Heartbeat.open(world), np.arange(16)
        heartbeat.marked_from, packed = 1, np.arange(128).tobytes()
        calls: dict[str, Callable[[], None]] = {
            "mark": lambda: heartbeat.mark("forward", epoch=1, step=12, micro_batch=3),
            "samples": lambda: heartbeat.samples(indices),
            "begin_step": lambda: heartbeat.begin_step(0, 0, packed, 16, 4),
            "enter": lambda: heartbeat.enter(FORWARD, 3, indices),
        }
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(max(2, alternations)):
            for name, call in calls.items():
                empty = _seconds(lambda: None)
                found[name].append(1e6 * (_seconds(call) - empty) / CALLS_IN_A_ROUND)
    return {name: Spread(tuple(values)) for name, values in found.items()}


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS_IN_A_ROUND):
        call()
    return time.perf_counter() - begin


def train(name: str, given: argparse.Namespace) -> Measured:
    """Runs one workload under the launcher and puts the ranks' files together."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        words = ["--workload", name, "--output", folder, "--alternations", str(given.alternations)]
        steps = max(1, WORKLOADS[name][0] // (10 if given.quick else 1))
        command = lockstep_run(PROCESSES, HERE / "sides" / "train.py", *words, "--steps", str(steps))
        subprocess.run(command, env=environment(), check=True, timeout=LIMIT)
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    sides = {side: list(zip(*(rank["rounds"][side] for rank in ranks), strict=True)) for side in (WITH, WITHOUT)}
    slowest = [
        {side: [max(rank[kind] for rank in each) for each in rounds] for side, rounds in sides.items()}
        for kind in (0, 1)
    ]
    return Measured(
        steps=slowest[0],
        on_core=slowest[1],
        calls={call: max(rank["calls"][call] for rank in ranks) for call in CALLS},
        microseconds={call: max(rank["microseconds"][call] for rank in ranks) for call in CALLS},
        supervisor=100 * statistics.mean(rank["supervisor"] for rank in ranks),
    )


def costs_section(costs: dict[str, Spread]) -> str:
    """The table of single calls."""
    rows = [[f"`Heartbeat.{name}`", spread.text()] for name, spread in costs.items()]
    table = report.table(["call", "microseconds"], rows)
    return f"## One call in a loop by itself, 16 samples in a micro-batch, 128 in a step\n\n{table}"


def steps_section(measured: dict[str, Measured]) -> str:
    """The table of steps."""
    rows = []
    for name, one in measured.items():
        more, more_on_core = _more(one.steps).text(), _more(one.on_core).text()
        step = Spread(tuple(one.steps[WITHOUT]))
        microseconds = sum(count * one.microseconds[call] for call, count in one.calls.items())
        counted = " + ".join(f"{one.calls[call]:.1f} x {one.microseconds[call]:.1f}" for call in CALLS)
        computed = f"{microseconds / (10 * step.median):.3f}"
        watchdog = f"{one.supervisor:.2f}"
        rows.append([WORKLOADS[name][1], step.text(), counted, computed, more_on_core, more, watchdog])
    head = [
        "job, 2 processes, ddp, K = 8",
        "ms per step without",
        "`begin_step` + `enter` + `await_data` of a rank in a step, microseconds",
        "% of a step",
        "% more time on a core, rounds with against rounds without",
        "% more time by the clock",
        "watchdog, % of one core",
    ]
    note = (
        "Within a step a call takes longer than in a loop by itself, because the step's own work drives it out of the "
        "processor's caches. In a short step `enter` stores one number; in long steps, and in a short one every 0.1 s "
        "or 32 steps, it calls `mark` and `samples`, which its time holds. Rounds with and without are those of the "
        "same processes in turn. The watchdog is the supervisor: a process of its own that wakes twice a second; where "
        "all cores train, it takes its share from them."
    )
    return f"## A step\n\n{note}\n\n{report.table(head, rows)}"


def _more(rounds: dict[str, list[float]]) -> Spread:
    """Percent by which rounds with the heartbeat take longer than those beside them without."""
    pairs = zip(rounds[WITH], rounds[WITHOUT], strict=True)
    return Spread(tuple(100 * (with_it / without - 1) for with_it, without in pairs))


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--alternations", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a few short rounds, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.alternations = 4
    return given


if __name__ == "__main__":
    main()
