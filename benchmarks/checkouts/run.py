"""Two checkouts of Lockstep in turn: what a step, a start, the heartbeat's calls and loading cost in each.

``python benchmarks/checkouts/run.py OTHER`` compares the checkout in the folder OTHER, such as one that
``git worktree add`` made of an earlier commit, with this one and writes RESULTS.md; ``--quick`` writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import report  # noqa: E402  the line above makes it importable
from harness.alternate import alternate  # noqa: E402
from harness.commands import environment  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

BEFORE, AFTER = "other checkout", "this checkout"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two alternations, nothing written")
    given = parser.parse_args()
    count = 2 if given.quick else given.alternations
    trees = {BEFORE: given.other.resolve(), AFTER: HERE.parents[1]}
    rows = []
    for title, workload, processes, more in (
        ("a step of the perceptron, 1 process, K = 8", "perceptron", 1, ["--micro-batches", "8"]),
        ("a step of the perceptron, 2 processes", "perceptron", 2, []),
        ("a step of the small ResNet, 2 processes", "resnet", 2, []),
    ):
        commands = {name: partial(step_side, tree, workload, processes, more) for name, tree in trees.items()}
        rows.append(row(f"{title} (ms)", alternate(commands, processes, alternations=count, seconds=2.0)))
    for processes in (1, 2, 4):
        starts: dict[str, list[float]] = {name: [] for name in trees}
        for turn in range(count + 1):
            for name, tree in trees.items():
                seconds = first_step(tree, processes)
                if turn:  # the first start of each fills the page cache
                    starts[name].append(seconds)
        rows.append(row(f"from the command to the first step, {processes} processes (s)", starts))
    calls = in_turn(trees, heartbeat, count)
    # A short step stores one number for each phase; how that call is named has changed.
    rows += [row(f"Heartbeat.{what} (microseconds)", found) for what, found in calls.items() if len(found) == 2]
    shares = in_turn(trees, loading, max(2, count // 3))
    rows += [row(f"batches of {what} (% of a step)", found) for what, found in shares.items()]
    table = report.table(["measured", BEFORE, AFTER, "ratio"], rows)
    print(table)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="Two checkouts",
            claim=claim(rows),
            sections=[
                "\n".join(f"- {name}: commit {commit(tree)}" for name, tree in trees.items()),
                f"## {count} alternations\n\n{table}",
                report.LEGEND,
            ],
            command=f"python benchmarks/checkouts/run.py OTHER --alternations {count}",
        )


def in_turn(
    trees: dict[str, Path], measure: Callable[[Path], dict[str, float]], count: int
) -> dict[str, dict[str, list[float]]]:
    """The measurements of ``measure`` in each checkout, in turn: {what: {side: values}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(count):
        for name, tree in trees.items():
            for what, value in measure(tree).items():
                found.setdefault(what, {}).setdefault(name, []).append(value)
    return found


def row(title: str, measured: dict[str, list[float]]) -> list[str]:
    """One row of the table: both sides, and this checkout over the other within each alternation."""
    before, after = measured[BEFORE], measured[AFTER]
    cells = [title, Spread(tuple(before)).text(), Spread(tuple(after)).text(), ratios(after, before).text()]
    print(" | ".join(cells), flush=True)
    return cells


def claim(rows: list[list[str]]) -> str:
    """Says which rows are slower in every alternation, whose ratios have no spread around 1."""
    slower = [f"{cells[0]}, {cells[3]}" for cells in rows if float(re.split(r"[;–]", cells[3])[2]) > 1]
    if not slower:
        return "This checkout is as fast as the other one: the ratios of no row are above 1 in every alternation."
    return "This checkout is slower than the other one, in every alternation, in: " + "; ".join(slower) + "."


def commit(tree: Path) -> str:
    """The commit of a checkout, in short."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def python_of(tree: Path, *arguments: str) -> list[str]:
    """A command line that imports Lockstep and the benchmarks' harness from a checkout."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "benchmarks")])
    return ["/usr/bin/env", f"PYTHONPATH={path}", sys.executable, *arguments]


def launch(tree: Path, processes: int, script: str, *arguments: str) -> list[str]:
    """``lockstep run`` of a checkout on its own script."""
    run = ["-m", "lockstep", "run", "--devices", f"cpu:{processes}", str(tree / "benchmarks" / script)]
    return python_of(tree, *run, *arguments)


def step_side(tree: Path, workload: str, processes: int, more: list[str], control: Path) -> list[str]:
    """The command line of one side of ``benchmarks/step``."""
    arguments = ["--workload", workload, "--control", str(control), *more]
    return launch(tree, processes, "step/sides/with_lockstep.py", *arguments)


def first_step(tree: Path, processes: int) -> float:
    """Seconds from the command until the last rank had finished its first step."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = launch(tree, processes, "launch/sides/with_lockstep.py", "--moments", folder)
        begin = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, env=environment(), timeout=180)
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - begin


def heartbeat(tree: Path) -> dict[str, float]:
    """Microseconds of the heartbeat's calls, by ``benchmarks/heartbeat``; storing a phase is called ``enter``."""
    program = (
        f"import json, sys; sys.path.insert(0, {str(tree / 'benchmarks' / 'heartbeat')!r}); import run; "
        "print(json.dumps({name: spread.median for name, spread in run.call_costs(5).items()}))"
    )
    done = subprocess.run(
        python_of(tree, "-c", program),
        check=True,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    found = json.loads(done.stdout)
    return {"enter" if name.startswith("place") else name: value for name, value in found.items()}


def loading(tree: Path) -> dict[str, float]:
    """Percent of a perceptron's step that batches take, by data set, as ``benchmarks/loading --quick`` prints it."""
    command = python_of(tree, str(tree / "benchmarks" / "loading" / "run.py"), "--quick")
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=600)
    found = {}
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        percent = re.match(r"(\d+\.\d+) ?%?", cells[-1])
        if len(cells) > 2 and percent and not cells[0].isdigit():  # those are batch sizes, of another table
            found[cells[0]] = float(percent[1])
    return found


if __name__ == "__main__":
    main()
