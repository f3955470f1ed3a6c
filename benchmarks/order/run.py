"""The cost of ``reduce="ordered"`` against ``"ring"``: the exchange alone, and in a ResNet's whole step.

``python benchmarks/order/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import Rounds, alternate  # noqa: E402
from harness.commands import environment, lockstep_run, torchrun  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

CLAIM = (
    'A whole training step of the small ResNet with `reduce="ordered"` takes at most 1.05x of one with '
    '`reduce="ring"`, for 1, 10 and 100 MB of gradients.'
)
REDUCERS = {
    "ordered, shared memory": "ordered",
    "ordered, collectives": "ordered-collectives",
    "ring": "ring",
}
"""Names in the tables, as in ``sides/exchange.py``, and what the training side is told."""
LIMIT = 600.0
"""Seconds that all exchanges of one number of processes may take."""


def main() -> None:
    given = read_command_line()
    sections = []
    for processes in given.processes:
        exchanged = exchanges(given, processes)
        sections.append(exchange_section(processes, exchanged))
        print(sections[-1], flush=True)
        if not given.skip_steps:
            stepped = {megabytes: steps(given, processes, megabytes) for megabytes in given.megabytes}
            sections.append(step_section(processes, stepped))
            print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="The cost of order",
            claim=CLAIM,
            sections=[*sections, report.LEGEND],
        )


def read_command_line() -> argparse.Namespace:
    parser = options.parser_of_alternations(10)
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 10, 100], choices=[1, 10, 100])
    parser.add_argument("--skip-steps", action="store_true", help="measure the exchange alone")
    return options.read(parser)


def exchanges(given: argparse.Namespace, processes: int) -> dict[str, Rounds]:
    """Milliseconds of the exchange alone, by megabytes and reducer."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        output = Path(folder) / "measured.json"
        sizes = [str(megabytes) for megabytes in given.megabytes]
        rounds = ["--alternations", str(given.alternations), "--seconds", str(given.seconds)]
        arguments = ["--megabytes", *sizes, *rounds, "--output", str(output)]
        command = torchrun(processes, HERE / "sides" / "exchange.py", *arguments)
        subprocess.run(command, env=environment(), check=True, timeout=LIMIT)
        return json.loads(output.read_text())


def steps(given: argparse.Namespace, processes: int, megabytes: int) -> Rounds:
    """Milliseconds of a whole step of the ResNet with about that many megabytes of gradients."""
    commands: dict[str, Command] = {
        name: partial(side, option, processes, megabytes) for name, option in REDUCERS.items()
    }
    return alternate(commands, processes, alternations=given.alternations, seconds=given.seconds)


def side(reduce: str, processes: int, megabytes: int, control: Path) -> list[str]:
    """The command line that trains the ResNet with one reducer."""
    script = HERE.parent / "step" / "sides" / "with_lockstep.py"
    arguments = ["--workload", f"resnet-{megabytes}mb", "--reduce", reduce, "--control", str(control)]
    return lockstep_run(processes, script, *arguments)


def exchange_section(processes: int, measured: dict[str, Rounds]) -> str:
    """The table of the exchange alone."""
    rows = [
        [size, name, Spread(tuple(times)).text(), ratios(times, sides["ring"]).text()]
        for size, sides in measured.items()
        for name, times in sides.items()
    ]
    head = ["MB of gradients", "reducer", "ms per exchange", "ratio to ring"]
    return f"## The exchange alone, {processes} processes\n\n{report.table(head, rows)}"


def step_section(processes: int, measured: dict[int, Rounds]) -> str:
    """The table of whole steps."""
    rows = [
        [str(size), name, Spread(tuple(times)).text(), ratios(times, sides["ring"]).text(3)]
        for size, sides in measured.items()
        for name, times in sides.items()
    ]
    head = ["MB of gradients", "reducer", "ms per step", "ratio to ring"]
    return f"## A whole step of the ResNet, {processes} processes\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    main()
