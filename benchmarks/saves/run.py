"""The cost of a checkpoint for a training loop: written in the background, waited for, or not written at all.

``python benchmarks/saves/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402  the line above makes the harness importable
from harness import report  # noqa: E402
from harness.spread import Spread, ratios  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import lockstep  # noqa: E402
from lockstep.runtime.stop_signals import wait_for_critical_threads  # noqa: E402

CLAIM = "Written in the background, a checkpoint holds training up only for as long as its state is copied."
NONE, BACKGROUND, WAITED = "no checkpoint", "in the background", "training waits"
BATCH = 64


@dataclass
class Side:
    """The rounds of one side."""

    rounds: list[float] = field(default_factory=list)
    """Seconds of the steps of a round, its save included."""
    saves: list[float] = field(default_factory=list)
    """Seconds that the save itself held the loop up."""


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-saves-", dir=given.directory))
    try:
        loop = Loop(given, folder)
        sides = {name: Side() for name in (NONE, BACKGROUND, WAITED)}
        for alternation in range(given.alternations + 1):
            for name, side in sides.items():
                loop.round(name, side if alternation else Side())  # the first warms up
    finally:
        wait_for_critical_threads()
        shutil.rmtree(folder)
    sections = [described(given, loop), table(sides)]
    print("\n\n".join(sections))
    if not given.quick:
        report.write(
            HERE / "RESULTS.md",
            title="What a checkpoint costs",
            claim=CLAIM,
            command="python benchmarks/saves/run.py",
            sections=[*sections, report.LEGEND],
        )


class Loop:
    """One process that trains, and saves as it is told."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._steps, width = given.steps, given.width
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 10))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._run = lockstep.init(
            global_batch=BATCH, micro_batches=1, strategy="single", directory=folder, keep=1, threads=1
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        _, self._optimizer = self._run.prepare(model, optimizer)
        samples = torch.randn(16 * BATCH, width), torch.randint(10, (16 * BATCH,))
        self._batches = self._endless(TensorDataset(*samples))

    def _endless(self, data: TensorDataset) -> Iterator[Any]:
        while True:
            yield from self._run.batches(data)

    def round(self, name: str, side: Side) -> None:
        """Times the steps of a round; the save stands after the first of them."""
        wait_for_critical_threads()
        begin = time.perf_counter()
        for number in range(self._steps):
            batch = next(self._batches)
            self._run.backward(batch, nn.functional.cross_entropy)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if number == 0 and name != NONE:
                before = time.perf_counter()
                self._run.save(wait=name == WAITED)
                side.saves.append(time.perf_counter() - before)
        side.rounds.append(time.perf_counter() - begin)


def table(sides: dict[str, Side]) -> str:
    rows = [
        [
            name,
            Spread(tuple(side.rounds)).text(3),
            ratios(side.rounds, sides[NONE].rounds).text() if name != NONE else "1",
            Spread(tuple(1000 * seconds for seconds in side.saves)).text(0) if side.saves else "",
        ]
        for name, side in sides.items()
    ]
    return report.table(["checkpoint", "seconds of a round", "ratio", "ms that the save took"], rows)


def described(given: argparse.Namespace, loop: Loop) -> str:
    megabytes = 12 * loop.parameters / 1e6
    return (
        f"A perceptron of {loop.parameters / 1e6:.1f} million parameters with AdamW, so {megabytes:.0f} MB of state, "
        f"{given.steps} steps a round with one checkpoint after the first, {given.alternations} alternations after one "
        "to warm up, one thread a process; the writer is a second thread. The fingerprint of the state, which every "
        "checkpoint holds, is computed by the save on both sides."
    )


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=None, help="where checkpoints are written")
    parser.add_argument("--quick", action="store_true", help="two short alternations, nothing written")
    given = parser.parse_args()
    if given.quick:
        given.alternations, given.steps, given.width = 2, 5, 512
    return given


if __name__ == "__main__":
    main()
