"""What a rank runs to measure the exchange of gradients alone: the job's own reducer over messages of several sizes."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.process_group import open_process_group
from lockstep.reduce import BucketShape, Holding, Reducer, open_reducer
from lockstep.world import World

_HEADER = 64
_FEWEST = 3


def main(payload: Any) -> None:
    """Times exchanges on this rank and writes ``messages-N.json``: seconds by bytes, and bytes added per second.

    Args:
        payload: ``{"reduce": name, "micro_batches": K, "sizes": bytes of each message, "seconds": to spend on each,
            "threads": of a rank, "timeout": seconds, "folder": path}``.
    """
    world, folder = World.from_environment(), Path(payload["folder"])
    torch.set_num_threads(payload["threads"])
    with open_process_group(world, timeout=payload["timeout"]):
        group = dist.group.WORLD
        assert group is not None, "messages are measured between ranks"
        times = {}
        for size in payload["sizes"]:
            reducer = open_reducer(payload["reduce"], group, torch.device("cpu"), payload["timeout"])
            times[size] = _exchange(reducer, group, size // 4, payload["micro_batches"], payload["seconds"])
            reducer.release()
        found = {"seconds": times, "adding": _adding()}
        (folder / f"messages-{world.rank}.json").write_text(json.dumps(found))
        del group


def _exchange(reducer: Reducer, group: dist.ProcessGroup, numel: int, leaves: int, seconds: float) -> float:
    """Median seconds of one exchange of a bucket of ``numel`` float32. Collective."""
    reducer.allocate([BucketShape(numel, torch.float32, ((numel,),))], _HEADER, leaves)
    mine = len(Holding.of(leaves, group.size()).ranks[group.rank()])
    nodes = torch.ones(mine, numel)
    header = torch.zeros(_HEADER, dtype=torch.float64)
    taken: list[float] = []
    spent = torch.zeros(1, dtype=torch.float64)
    while len(taken) < _FEWEST or float(spent) < seconds:
        dist.barrier(group)
        began = time.perf_counter()
        reducer.begin(leaves)
        for slot in range(mine):
            reducer.staging(0, slot).copy_(nodes[slot])
        reducer.start(0)
        reducer.finish(header)
        taken.append(time.perf_counter() - began)
        spent += taken[-1]
        dist.all_reduce(spent, dist.ReduceOp.MAX, group)  # so that all ranks stop at the same exchange
    return statistics.median(taken[1:])


def _adding() -> float:
    """Bytes of one operand that are added to another in a second."""
    left, right = torch.ones(1 << 20), torch.ones(1 << 20)
    taken = []
    for _ in range(8):
        began = time.perf_counter()
        left.add_(right)
        taken.append(time.perf_counter() - began)
    return left.nbytes / statistics.median(taken)
