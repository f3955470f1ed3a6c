"""One rank of a pipeline of equal layers; writes when each of its passes began and ended."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

WIDTH, ROWS = 512, 512


class Stopwatch:
    """Notes (name, start, stop) of passes, by a clock that all processes of the machine share."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._start = 0.0
        self._forwards: dict[int, int] = {}

    def watch(self, number: int, stage: nn.Sequential) -> None:
        """Times the forward passes of a stage; its backward passes are timed by ``backward``."""
        stage[0].register_forward_pre_hook(lambda *_: self._begin())
        stage[-1].register_forward_hook(lambda *_: self._end(f"{number}F"))

    def backward(self, *arguments: Any, **named: Any) -> None:
        """torch.autograd.backward, timed."""
        self._begin()
        _BACKWARD(*arguments, **named)
        self._end("B")

    def _begin(self) -> None:
        self._start = time.monotonic()

    def _end(self, name: str) -> None:
        self.spans.append((name, self._start, time.monotonic()))


_BACKWARD = torch.autograd.backward


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Anything with a gradient."""
    return (output - target).square().mean(1)


def main() -> None:
    given = read_command_line()
    run = lockstep.init(
        global_batch=given.count * ROWS,
        micro_batches=given.count,
        strategy="pipeline",
        checks="off",
        pipeline={
            "schedule": given.schedule,
            "stages_per_rank": given.per_rank,
            "split": [f"{number}.0" for number in range(1, given.stages)],
        },
    )
    clock = Stopwatch()
    layers = [nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]) for _ in range(given.stages)]
    for number, layer in enumerate(layers):
        clock.watch(number, layer)
    model = nn.Sequential(*layers)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    torch.autograd.backward = clock.backward
    rows = torch.randn(given.count * ROWS, WIDTH)
    steps: list[list[tuple[str, float, float]]] = []
    for _ in run.epochs(given.steps):
        for batch in run.batches(TensorDataset(rows, rows)):
            clock.spans = []
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(clock.spans)
    (given.output / f"rank-{run.world.rank}.json").write_text(json.dumps(steps))


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--count", type=int, required=True, help="micro-batches per step")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--per-rank", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
