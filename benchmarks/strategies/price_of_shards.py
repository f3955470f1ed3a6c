"""The price of shards: what ``tensor.shards``, level A, costs in time against a shard for each rank, level B.

``python benchmarks/strategies/price_of_shards.py`` writes PRICE_OF_SHARDS.md; ``--quick`` is two short alternations,
nothing written.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import alternate  # noqa: E402
from harness.commands import lockstep_run  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

from run import side  # noqa: E402  beside this file

CLAIM = (
    "As many shards as ranks cost what strategy tensor costs without tensor.shards; more shards than ranks mean "
    "smaller matrices, one kernel for each."
)
SHARDS = (2, 4)
"""Numbers that two ranks and the four heads of the model allow."""
NOTES = (
    "The model is a decoder of 6 blocks (4.9 million parameters, 4 heads), 16 sequences of 32 tokens a step in "
    "two micro-batches, SGD with momentum, one thread a process. All sides are alive at once and run in turn; ratios "
    "are taken within each alternation."
)


def main() -> None:
    given = options.read(options.parser_of_alternations(8))
    section = measure(given)
    print(section, flush=True)
    if not given.quick:
        report.write(
            HERE / "PRICE_OF_SHARDS.md",
            title="The price of shards",
            claim=CLAIM,
            sections=[section, report.LEGEND, NOTES],
        )


def measure(given: argparse.Namespace) -> str:
    """The table: strategy tensor on two ranks, and one device, each without shards and with some."""
    commands: dict[str, Command] = {}
    ranks: dict[str, int] = {}
    for strategy, count in (("tensor", 2), ("single", 1)):
        for shards in (0, *SHARDS):
            name = f"{strategy}, {f'P = {shards}' if shards else 'without'}"
            arguments = ["--micro-batches", "2", "--strategy", strategy, "--shards", str(shards)]
            commands[name] = partial(side, lockstep_run, count, "with_lockstep.py", arguments)
            ranks[name] = count
    times = alternate(commands, ranks, alternations=given.alternations, seconds=given.seconds)
    rows = []
    for name, found in times.items():
        reference = times[f"{name.partition(',')[0]}, without"]
        rows.append([name, Spread(tuple(found)).text(1), ratios(found, reference).text()])
    head = ["side", "ms per step", "ratio to the same without shards"]
    return f"## 2 ranks, K = 2, {given.alternations} alternations\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    main()
