"""The bytes and time of each way to sum gradients, and the cost of BatchNorm over the global batch.

``python benchmarks/reducers/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import alternate  # noqa: E402
from harness.commands import lockstep_run  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

CLAIM = (
    "`bf16` sends half the bytes of `ordered` over collectives, and `powersgd` a small part of them; the time per step "
    "is what they cost on one host, where the network is no bottleneck."
)
SIDES = {
    "ordered, shared memory": {},
    "ordered, collectives": {"shared_memory": False},
    "ring": {"reduce": "ring"},
    "bf16": {"reduce": "bf16"},
    "powersgd, rank 4": {"reduce": "powersgd"},
    "powersgd, rank 4, collectives": {"reduce": "powersgd", "shared_memory": False},
    "ordered, sync_batch_norm": {"sync_batch_norm": True},
    "ordered, sync_batch_norm, collectives": {"sync_batch_norm": True, "shared_memory": False},
}
"""Names in the table, and the options of ``lockstep.init`` that make them."""
REFERENCE = "ordered, collectives"


def main() -> None:
    given = read_command_line()
    sections = []
    for processes in given.processes:
        for workload in given.workloads:
            sections.append(measure(given, workload, processes))
            print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="Bytes and time of the reducers",
            claim=CLAIM,
            sections=[*sections, report.LEGEND],
        )


def read_command_line() -> argparse.Namespace:
    parser = options.parser_of_alternations(10)
    parser.add_argument("--workloads", nargs="+", default=["resnet-1mb", "resnet-10mb"])
    return options.read(parser)


def measure(given: argparse.Namespace, workload: str, processes: int) -> str:
    """The table of one workload: kilobytes and milliseconds per step of each side."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        sent = {name: Path(folder) / f"sent-{number}" for number, name in enumerate(SIDES)}
        commands: dict[str, Command] = {
            name: partial(side, options, workload, processes, sent[name]) for name, options in SIDES.items()
        }
        times = alternate(commands, processes, alternations=given.alternations, seconds=given.seconds)
        rows = [
            [
                name,
                f"{float(sent[name].read_text()) / 1000:,.1f}",
                Spread(tuple(times[name])).text(),
                ratios(times[name], times[REFERENCE]).text(3),
            ]
            for name in SIDES
        ]
    head = ["side", "kB per step and rank", "ms per step", f"ratio to {REFERENCE}"]
    return f"## {workload}, {processes} processes, K = 8\n\n{report.table(head, rows)}"


def side(options: dict[str, object], workload: str, processes: int, sent: Path, control: Path) -> list[str]:
    """The command line of one side."""
    arguments = ["--workload", workload, "--options", json.dumps(options), "--sent", str(sent)]
    return lockstep_run(processes, HERE / "sides" / "train.py", *arguments, "--control", str(control))


if __name__ == "__main__":
    main()
