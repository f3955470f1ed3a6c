"""Trains on every rank in rounds with and without the heartbeat, and notes what the supervisor took meanwhile.

Both sides are the same processes in the same minute: between two rounds only the calls of the heartbeat that a step
makes are replaced by functions that do nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.data import Digits
from lockstep.launch import Heartbeat
from lockstep.models import perceptron, resnet18

WITH, WITHOUT = "heartbeat", "no heartbeat"
COUNTED = {"digits": 640, "resnet": 32}
"""Steps whose calls are counted and timed, after some that warm up."""
WARM_UP = 8
CALLS = ("begin_step", "enter", "await_data")
GLOBAL_BATCH = {"digits": 128, "resnet": 32}


class Switch:
    """Puts the heartbeat's calls aside and back."""

    def __init__(self) -> None:
        self._real: dict[str, Callable[..., Any]] = {name: getattr(Heartbeat, name) for name in CALLS}
        self._clock: list[int] = []
        self._spent: dict[str, list[int]] = {name: [] for name in CALLS}

    def turn(self, side: str) -> None:
        """From now on with or without."""
        for name in CALLS:
            setattr(Heartbeat, name, self._real[name] if side == WITH else _nothing)

    def count(self) -> None:
        """Counts the calls from now on, and times each."""
        for name in CALLS:
            setattr(Heartbeat, name, self._counting(self._real[name], self._spent[name]))

    def _counting(self, call: Callable[..., Any], spent: list[int]) -> Callable[..., Any]:
        def counted(*arguments: Any, **words: Any) -> Any:
            begin = time.perf_counter_ns()
            result = call(*arguments, **words)
            end = time.perf_counter_ns()
            self._clock.append(time.perf_counter_ns() - end)
            spent.append(end - begin)
            return result

        return counted

    def calls(self, steps: int) -> dict[str, float]:
        """The number of times that a step makes each call."""
        return {name: len(spent) / steps for name, spent in self._spent.items()}

    def microseconds(self) -> dict[str, float]:
        """Of each call within a step, the median, less what the clock itself takes."""
        clock = statistics.median(self._clock)
        return {
            name: (statistics.median(spent) - clock) / 1000 if spent else 0.0 for name, spent in self._spent.items()
        }


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Loop:
    """The steps of one workload, without an end."""

    def __init__(self, workload: str) -> None:
        torch.manual_seed(0)
        model, self._data = _digits() if workload == "digits" else _photos()
        self._run = lockstep.init(global_batch=GLOBAL_BATCH[workload], micro_batches=8, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        _, self._optimizer = self._run.prepare(model, optimizer)
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        for _ in self._run.epochs(10**6):
            yield from self._run.batches(self._data, drop_last=True)

    def steps(self, count: int) -> tuple[float, float]:
        """Trains so many steps; milliseconds per step, and those of them that this thread was on a core."""
        begin, on_core = time.perf_counter(), time.thread_time()
        for _ in range(count):
            self._run.backward(next(self._batches), nn.functional.cross_entropy)
            self._optimizer.step()
            self._optimizer.zero_grad()
        spent = time.perf_counter() - begin, time.thread_time() - on_core
        return 1000 * spent[0] / count, 1000 * spent[1] / count


def _digits() -> tuple[nn.Module, Any]:
    return perceptron(in_features=64), Digits("train")


def _photos() -> tuple[nn.Module, Any]:
    images, labels = torch.randn(512, 3, 64, 64), torch.randint(10, (512,))
    return resnet18(num_classes=10), torch.utils.data.TensorDataset(images, labels)


def supervisor_seconds() -> float:
    """CPU seconds of the command that started this run so far."""
    status = Path(f"/proc/{os.getppid()}/stat").read_text()  # of the fork server
    supervisor = int(status.rpartition(")")[2].split()[1])
    return int(Path(f"/proc/{supervisor}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    given = read_command_line()
    loop, switch = Loop(given.workload), Switch()
    loop.steps(WARM_UP)
    switch.count()
    loop.steps(COUNTED[given.workload])
    rounds: dict[str, list[tuple[float, float]]] = {WITH: [], WITHOUT: []}
    began, before = time.monotonic(), supervisor_seconds()
    for alternation in range(given.alternations):
        for side in sorted(rounds, reverse=bool(alternation % 2)):  # A B B A A B: a drift hits both
            switch.turn(side)
            rounds[side].append(loop.steps(given.steps))
    switch.turn(WITH)
    measured = {
        "rounds": rounds,
        "calls": switch.calls(COUNTED[given.workload]),
        "microseconds": switch.microseconds(),
        "supervisor": (supervisor_seconds() - before) / (time.monotonic() - began),
    }
    (given.output / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(measured))


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=list(GLOBAL_BATCH), required=True)
    parser.add_argument("--alternations", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a round")
    parser.add_argument("--output", type=Path, required=True, help="folder for one file a rank")
    torch.set_num_threads(1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
