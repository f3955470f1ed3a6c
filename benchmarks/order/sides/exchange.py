"""Exchanges gradients alone, one way after the other on the same ranks, and writes the milliseconds as JSON.

One exchange is what a step does besides computing: each bucket's gradient is copied to its place and started,
then all sums and the header are waited for. Before anything is timed, all ways must give the same sums.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.reduce import BucketShape, OrderedReducer, Reducer, RingReducer, open_reducer

BUCKET = 8 << 20
HEADER = 16
TIMEOUT = 120.0
CPU = torch.device("cpu")


def main() -> None:
    given = read_command_line()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = {size: measure(size, given.alternations, given.seconds) for size in given.megabytes}
    if dist.get_rank() == 0:
        given.output.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", nargs="+", type=int, required=True)
    parser.add_argument("--alternations", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="about how long a round lasts")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def measure(megabytes: int, alternations: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one exchange by each reducer, one number an alternation, by the slowest rank."""
    gradients = list(torch.randn(megabytes * 10**6 // 4).split(BUCKET // 4))
    group = dist.group.WORLD
    assert group is not None
    reducers: dict[str, Reducer] = {
        "ordered, shared memory": open_reducer("ordered", group, CPU, TIMEOUT),
        "ordered, collectives": OrderedReducer(group, dist.new_group(), CPU),
        "ring": RingReducer(group, CPU),
    }
    for reducer in reducers.values():
        shapes = [BucketShape(part.numel(), part.dtype) for part in gradients]
        reducer.allocate(shapes, HEADER, dist.get_world_size())
    slowest = max(timed(reducer, gradients, 3) for reducer in reducers.values())
    for bucket in range(len(gradients)):
        for reducer in reducers.values():
            torch.testing.assert_close(reducer.total(bucket), reducers["ring"].total(bucket))
    count = max(3, round(1000 * seconds / slowest))
    times: dict[str, list[float]] = {name: [] for name in reducers}
    for _ in range(alternations):
        for name, reducer in reducers.items():
            times[name].append(timed(reducer, gradients, count))
    return times


def timed(reducer: Reducer, gradients: list[Tensor], count: int) -> float:
    """Milliseconds of one exchange: the slowest rank's mean over ``count``, after one that is not timed."""
    exchange(reducer, gradients)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        exchange(reducer, gradients)
    took = torch.tensor(1000 * (time.perf_counter() - begin) / count, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def exchange(reducer: Reducer, gradients: list[Tensor]) -> None:
    """One step's exchange of one micro-batch a rank."""
    reducer.begin(dist.get_world_size())
    for bucket, gradient in enumerate(gradients):
        reducer.staging(bucket, 0).copy_(gradient)
        reducer.start(bucket)
    reducer.finish(torch.zeros(HEADER, dtype=torch.float64))


if __name__ == "__main__":
    main()
