"""Milliseconds per optimizer step against DDP by hand, Accelerate, Fabric and Trainer, and the price of K.

``python benchmarks/step/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import Rounds, alternate  # noqa: E402
from harness.commands import Launcher, lockstep_run, torchrun  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

BASELINE = "hand-written DDP"
OURS = "lockstep"
THEIRS = {
    BASELINE: "hand_written.py",
    "Accelerate": "with_accelerate.py",
    "Fabric": "with_fabric.py",
    "Trainer": "with_trainer.py",
}
CLAIM = (
    "With ordered reduction and fingerprint on, a Lockstep step takes at most 1.0x of a hand-written DDP "
    "step on the small ResNet and at most 0.7x on the perceptron (2 processes, one thread each)."
)


def main() -> None:
    given = read_command_line()
    sections = []
    for workload in given.workloads:
        for processes in given.processes:
            commands = compared(workload, processes, given.fetch, given.sides)
            measured = alternate(commands, processes, alternations=given.alternations, seconds=given.seconds)
            sections.append(compared_section(workload, processes, measured, given.fetch))
            print(sections[-1], flush=True)
        if OURS in given.sides and not given.skip_price:
            commands, ranks = priced(workload, given.fetch)
            measured = alternate(commands, ranks, alternations=given.alternations, seconds=given.seconds)
            sections.append(price_section(workload, measured))
            print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / given.output,
            title="Milliseconds per step",
            claim=CLAIM,
            sections=[*sections, report.LEGEND],
        )


def read_command_line() -> argparse.Namespace:
    parser = options.parser_of_alternations(10)
    parser.add_argument("--workloads", nargs="+", default=["perceptron", "resnet"])
    parser.add_argument("--sides", nargs="+", default=[OURS, *THEIRS], choices=[OURS, *THEIRS])
    parser.add_argument("--fetch", choices=["rows", "items"], default="rows")
    parser.add_argument("--output", default="RESULTS.md", help="file beside this one")
    parser.add_argument("--skip-price", action="store_true", help="leave out the price of K")
    return options.read(parser)


def compared(workload: str, processes: int, fetch: str, sides: Sequence[str]) -> dict[str, Command]:
    """The sides of one comparison: K = W, so every rank has one micro-batch."""
    commands: dict[str, Command] = {}
    for name in sides:
        script, start = ("with_lockstep.py", lockstep_run) if name == OURS else (THEIRS[name], torchrun)
        commands[name] = partial(side, start, processes, script, ["--workload", workload, "--fetch", fetch])
    return commands


def priced(workload: str, fetch: str) -> tuple[dict[str, Command], dict[str, int]]:
    """Lockstep alone, the same global batch as K micro-batches on one and two processes."""
    commands: dict[str, Command] = {}
    ranks: dict[str, int] = {}
    for processes in (1, 2):
        for k in (2, 4, 8, 16):
            name = f"K={k} W={processes}"
            arguments = ["--workload", workload, "--fetch", fetch, "--micro-batches", str(k)]
            commands[name] = partial(side, lockstep_run, processes, "with_lockstep.py", arguments)
            ranks[name] = processes
    return commands, ranks


def side(start: Launcher, processes: int, script: str, arguments: list[str], control: Path) -> list[str]:
    """The command line of one side, once its control socket is known."""
    return start(processes, HERE / "sides" / script, *arguments, "--control", str(control))


def compared_section(workload: str, processes: int, measured: Rounds, fetch: str) -> str:
    """The table of one comparison: milliseconds, and the ratio to the baseline within each alternation."""
    rows = []
    for name, times in measured.items():
        ratio = ratios(times, measured[BASELINE]).text() if BASELINE in measured else ""
        rows.append([name, Spread(tuple(times)).text(), ratio])
    head = ["side", "ms per step", f"ratio to {BASELINE}"]
    runs = len(next(iter(measured.values())))
    title = f"## {workload}, {processes} processes, {runs} alternations, fetch by {fetch}"
    return f"{title}\n\n{report.table(head, rows)}"


def price_section(workload: str, measured: Mapping[str, Sequence[float]]) -> str:
    """The table of what more micro-batches cost, against K = 2 on as many processes."""
    rows = []
    for name, times in measured.items():
        base = measured["K=2 " + name.split()[1]]
        rows.append([name, Spread(tuple(times)).text(), ratios(times, base).text()])
    head = ["micro-batches and processes", "ms per step", "ratio to K=2"]
    return f"## {workload}, the price of K\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    main()
