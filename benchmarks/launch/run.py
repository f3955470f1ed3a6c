"""Seconds from the command to the first finished step on all ranks, against torchrun and DDP by hand.

``python benchmarks/launch/run.py`` writes RESULTS.md; ``--quick`` runs two alternations and writes nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import report  # noqa: E402  the line above makes it importable
from harness.commands import Launcher, environment, lockstep_run, torchrun  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

OURS, BASELINE = "lockstep run", "torchrun"
SIDES: dict[str, tuple[Launcher, str]] = {
    OURS: (lockstep_run, "with_lockstep.py"),
    BASELINE: (torchrun, "hand_written.py"),
}
CLAIM = (
    "From the command to the first finished step, `lockstep run` on 8 processes takes at most 0.25x of what "
    "torchrun with a hand-written DDP loop takes."
)
LIMIT = 180.0
"""Seconds that one start may take."""


@dataclass(frozen=True)
class Start:
    """One start of all ranks, in seconds from the command."""

    first_step: float
    """Until the last rank had finished its first step."""
    end: float
    """Until the command returned."""


def main() -> None:
    given = read_command_line()
    rows = []
    for processes in given.processes:
        starts: dict[str, list[Start]] = {name: [] for name in given.sides}
        for name in given.sides:
            start(name, processes)
        for _ in range(given.alternations):
            for name in given.sides:
                starts[name].append(start(name, processes))
        rows += table_rows(processes, starts)
        print("\n".join(" | ".join(row) for row in rows[-len(given.sides) :]), flush=True)
    head = ["processes", "command", "s to the first step", "s to the end", f"ratio to {BASELINE}, first step"]
    title = f"## {given.alternations} alternations, after one start of each that is not counted"
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="Seconds to the first step",
            claim=CLAIM,
            sections=[f"{title}\n\n{report.table(head, rows)}", report.LEGEND],
        )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--sides", nargs="+", default=[OURS, BASELINE], choices=[OURS, BASELINE])
    parser.add_argument("--alternations", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two alternations, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.alternations = 2
    return given


def start(name: str, processes: int) -> Start:
    """Runs one command to its end and reads when the ranks had finished their first step."""
    launcher, script = SIDES[name]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = launcher(processes, HERE / "sides" / script, "--moments", folder)
        begin = time.monotonic()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=LIMIT,
            check=False,
        )
        end = time.monotonic()
        moments = [float(path.read_text()) for path in Path(folder).iterdir()]
    if done.returncode or len(moments) != processes:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SystemExit(f"{name}: status {done.returncode}, and {len(moments)} of {processes} ranks did a first step.")
    return Start(max(moments) - begin, end - begin)


def table_rows(processes: int, starts: dict[str, list[Start]]) -> list[list[str]]:
    """One row for each command."""
    first = {name: [one.first_step for one in some] for name, some in starts.items()}
    rows = []
    for name, some in starts.items():
        end = Spread(tuple(one.end for one in some))
        ratio = ratios(first[name], first[BASELINE]).text() if BASELINE in first else ""
        rows.append([str(processes), f"`{name}`", Spread(tuple(first[name])).text(), end.text(), ratio])
    return rows


if __name__ == "__main__":
    main()
