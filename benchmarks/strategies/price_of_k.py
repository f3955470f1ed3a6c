"""The price of K: what more micro-batches than ranks cost, in time and in partial sums of gradients.

``python benchmarks/strategies/price_of_k.py`` writes PRICE_OF_K.md; ``--quick`` is two short alternations at W = 2 and
K = 2 and 4, nothing written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import options, report  # noqa: E402  the line above makes it importable
from harness.alternate import Rounds, alternate  # noqa: E402
from harness.commands import environment, lockstep_run, torchrun  # noqa: E402
from harness.sides import Command  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402

from run import side  # noqa: E402  beside this file

CLAIM = (
    "With K > W, a step takes about as long as torch's own that computes as many micro-batches and, under fsdp, "
    "reduces each of them; and a rank holds at most log2(K / W) partial sums of the gradients between micro-batches, "
    "under fsdp of its rows."
)
FACTORS = (1, 2, 4)
"""K / W."""
PLAIN = {
    "ddp": {"DDP, no_sync": "no_sync", "DDP, reduces each": "every"},
    "fsdp": {"FSDP2, reduces each": "every"},
}
"""torch's own sides of each strategy, and how they accumulate."""
ALONE = "computing alone"
"""The side of ranks that compute as many micro-batches and exchange nothing."""
NOTES = (
    "The model is a decoder of 6 blocks (4.9 million parameters), 16 sequences of 32 tokens a step, whatever K is; SGD "
    "with momentum, one thread a process. All sides of a table are alive at once and run in turn. Partial sums are "
    "counted before every forward pass, in whole gradients of the model. What more and smaller micro-batches cost "
    "where ranks exchange nothing at all is in the column 'computing alone': no strategy can go below it."
)


@dataclass(frozen=True)
class Held:
    """The most partial sums that a rank held."""

    bytes: int
    whole: int
    """Bytes of one gradient of the whole model."""

    @property
    def gradients(self) -> float:
        """As a number of whole gradients."""
        return self.bytes / self.whole


def main() -> None:
    given = read_command_line()
    sections = []
    for processes in given.processes:
        for strategy in given.strategies:
            sections.append(measure(strategy, processes, given))
            print(sections[-1], flush=True)
    if not given.quick:
        report.write(
            HERE / "PRICE_OF_K.md",
            title="The price of K",
            claim=CLAIM,
            sections=[*sections, report.LEGEND, NOTES],
        )


def read_command_line() -> argparse.Namespace:
    parser = options.parser_of_alternations(8)
    parser.add_argument("--strategies", nargs="+", choices=list(PLAIN), default=list(PLAIN))
    parser.add_argument("--factors", nargs="+", type=int, default=list(FACTORS), help="K / W, from 1 on")
    given = options.read(parser)
    if given.quick:
        given.processes, given.factors = [2], [1, 2]
    return given


def measure(strategy: str, processes: int, given: argparse.Namespace) -> str:
    """The table of one strategy on one number of processes."""
    counts = [factor * processes for factor in given.factors]
    commands = {f"{name}, K = {k}": each for k in counts for name, each in sides(strategy, processes, k).items()}
    times = alternate(commands, processes, alternations=given.alternations, seconds=given.seconds)
    rows = [row(k, strategy, processes, times) for k in counts]
    own = [f"ratio to {name}" for name in PLAIN[strategy]]
    head = ["K", "ms per step", "ratio to K = W", ALONE, *own, "partial sums held", "by formula"]
    return f"## {strategy}, {processes} processes, {given.alternations} alternations\n\n{report.table(head, rows)}"


def sides(strategy: str, processes: int, k: int) -> dict[str, Command]:
    """The command of Lockstep's side and of torch's own ones."""
    common = ["--micro-batches", str(k)]
    ours = [*common, "--strategy", strategy]
    commands: dict[str, Command] = {strategy: partial(side, lockstep_run, processes, "with_lockstep.py", ours)}
    for name, way in PLAIN[strategy].items():
        theirs = [*common, "--accumulate", way]
        commands[name] = partial(side, torchrun, processes, f"plain_{strategy}.py", theirs)
    alone = [*common, "--accumulate", "alone"]
    commands[ALONE] = partial(side, torchrun, processes, "plain_ddp.py", alone)
    return commands


def row(k: int, strategy: str, processes: int, times: Rounds) -> list[str]:
    """One line of a table. The formula's partial sums are of rows under fsdp, where W rows are one gradient."""
    ours, found = times[f"{strategy}, K = {k}"], held(strategy, processes, k)
    return [
        str(k),
        Spread(tuple(ours)).text(1),
        ratios(ours, times[f"{strategy}, K = {processes}"]).text(),
        ratios(times[f"{ALONE}, K = {k}"], times[f"{ALONE}, K = {processes}"]).text(),
        *(ratios(ours, times[f"{name}, K = {k}"]).text() for name in PLAIN[strategy]),
        f"{found.gradients:.2f} ({found.bytes / 1e6:.1f} MB)",
        f"{partial_sums(k, processes) / (processes if strategy == 'fsdp' else 1):.2f}",
    ]


def partial_sums(k: int, ranks: int) -> int:
    """The most partial sums that a rank holds of each gradient between its ``k / ranks`` micro-batches.

    After j of them a binary counter stands at j, and holds as many sums as j has ones.
    """
    return max(done.bit_count() for done in range(k // ranks))


def held(strategy: str, processes: int, k: int) -> Held:
    """Runs two steps that count, and takes the rank that held most."""
    with tempfile.TemporaryDirectory(prefix="held-") as folder:
        arguments = ["--strategy", strategy, "--micro-batches", str(k), "--output", folder]
        command = lockstep_run(processes, HERE / "sides" / "held.py", *arguments)
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return Held(max(each["held"] for each in found), found[0]["whole"])


if __name__ == "__main__":
    main()
