"""The cost of loading beside training: sets in memory, the sample plan, and random numbers keyed by sample.

``python benchmarks/loading/run.py`` writes RESULTS.md; ``--quick`` is two short rounds, nothing written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402  the line above makes the harness importable
from harness import report  # noqa: E402
from harness.spread import Spread  # noqa: E402
from keyed import plan_section, randomness_section  # noqa: E402
from sets import data_sets  # noqa: E402
from torch import nn  # noqa: E402

import lockstep  # noqa: E402
from lockstep.models import perceptron  # noqa: E402

CLAIM = (
    "Where the whole set is in memory (digits, CIFAR-10, IDX), batches come at under 5 % of a perceptron's training "
    "step. The sample plan of 10^9 samples takes under 50 MB and under 1 ms a step, and random numbers keyed by sample "
    "under 10 microseconds a sample."
)
BATCH = 128


class Side:
    """A perceptron that trains on one set; each round times how long the steps take, and how long their batches."""

    def __init__(self, data: Any, features: int, micro_batches: int) -> None:
        torch.manual_seed(0)
        model = perceptron(in_features=features)
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.size = "-".join(str(layer.in_features) for layer in linear) + f"-{linear[-1].out_features}"
        """Of the perceptron: its inputs, hidden units and outputs."""
        self._run = lockstep.init(
            global_batch=BATCH, micro_batches=micro_batches, strategy="single", threads=1, fingerprint_every=0
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        _, self._optimizer = self._run.prepare(model, optimizer)
        self._batches = self._endless(data)
        self.steps: list[float] = []
        """Microseconds of a step of each round, its batch included."""
        self.shares: list[float] = []
        """Percent of that in which the batch came."""

    def _endless(self, data: Any) -> Iterator[Any]:
        while True:
            yield from self._run.batches(data, drop_last=True)

    def round(self, steps: int, *, counts: bool) -> None:
        """Trains some steps."""
        loading = 0.0
        began = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            batch = next(self._batches)
            loading += time.perf_counter() - before
            self._run.backward(batch, nn.functional.cross_entropy)
            self._optimizer.step()
            self._optimizer.zero_grad()
        whole = time.perf_counter() - began
        if counts:
            self.steps.append(1e6 * whole / steps)
            self.shares.append(100 * loading / whole)


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    with data_sets() as sets:
        sides = {
            (name, k): Side(data, features, k) for name, (data, features) in sets.items() for k in given.micro_batches
        }
        for number in range(given.rounds + 1):  # the first warms up
            for side in sides.values():
                side.round(given.steps, counts=number > 0)
    sections = [described(given), table(sides), plan_section(given.rounds), randomness_section(given.rounds)]
    print("\n\n".join(sections))
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="What loading costs",
            claim=CLAIM,
            command="python benchmarks/loading/run.py",
            sections=[*sections, "Numbers are `median (quartiles; minimum–maximum)` over the rounds."],
        )


def table(sides: dict[tuple[str, int], Side]) -> str:
    rows = [
        [name, side.size, str(k), Spread(tuple(side.steps)).text(0), Spread(tuple(side.shares)).text(2)]
        for (name, k), side in sides.items()
    ]
    head = ["set in memory", "perceptron", "K", "microseconds of a step", "% of it in which its batch came"]
    return "## Sets in memory\n\n" + report.table(head, rows)


def described(given: argparse.Namespace) -> str:
    return (
        f"The perceptron has 256 and 128 hidden units, global batch {BATCH}, float32, SGD with momentum, one device, "
        f"one thread. {given.rounds} rounds of {given.steps} steps of each side in turn, after one to warm up. The "
        "time of a batch is all of `next(batches)`: the sample plan, reading, collating, and what begins an epoch (the "
        "digits have 11 steps). K is the number of micro-batches, 8 by default. CIFAR-10 and IDX are files of the "
        "published sizes with random pixels. Turning bytes into normalised floats belongs to the step."
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8], metavar="K")
    parser.add_argument("--quick", action="store_true", help="two short rounds, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.steps = 2, 30
    return given


if __name__ == "__main__":
    main()
