"""How fast ranks exchange data: an all-reduce over all of them, and each pair alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.doctor.finding import Finding, ok, warning

SMALL, LARGE = 8, 8 << 20
"""Bytes of the messages that latency and bandwidth are measured with."""
_SLOW_PAIR = 3.0


@dataclass(frozen=True)
class Link:
    """Two ranks, and the time that a large message takes there and back."""

    left: int
    right: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second in one direction."""
        return 2 * LARGE / self.seconds


def measure() -> dict[str, Any]:
    """Times all-reduces and every pair's exchange; runs on every rank, gives the same on all. Collective.

    Returns:
        ``latency`` and ``large`` (seconds of an all-reduce of 8 bytes and of 8 MiB), ``pairs`` as [left, right,
        seconds], and ``hosts``, the name of each rank's host.
    """
    import torch
    import torch.distributed as dist

    from lockstep.collectives import gather_json
    from lockstep.process_group import open_process_group
    from lockstep.world import World, host_name

    world = World.from_environment()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world.world_size == 1:
        return {"latency": 0.0, "large": 0.0, "pairs": [], "hosts": [host_name()]}
    with open_process_group(world, backend="nccl" if on_gpu else "gloo"):
        assert dist.group.WORLD is not None, "it was opened above"
        hosts = gather_json(host_name(), dist.group.WORLD, device)
        small = torch.zeros(SMALL // 4, device=device)
        large = torch.zeros(LARGE // 4, device=device)
        found = {
            "latency": _median(lambda: dist.all_reduce(small), 20, device),
            "large": _median(lambda: dist.all_reduce(large), 5, device),
        }
        pairs = [
            [left, right, _pair(left, right, world.rank, large, device)]
            for left in range(world.world_size)
            for right in range(left + 1, world.world_size)
        ]
        times = torch.tensor([seconds for _, _, seconds in pairs], dtype=torch.float64, device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        measured = times.tolist()
    timed = [[left, right, s] for (left, right, _), s in zip(pairs, measured)]
    return {**found, "pairs": timed, "hosts": hosts}


def judge_links(found: dict[str, Any]) -> list[Finding]:
    """What the measurement means.

    Args:
        found: what ``measure`` gave.
    """
    hosts = found["hosts"]
    ranks, several = len(hosts), len(set(hosts))
    if ranks < 2:
        return [ok("all-reduce", "one device: nothing to exchange")]
    links = [Link(*pair) for pair in found["pairs"]]
    rate = 2 * (ranks - 1) / ranks * LARGE / found["large"] / 1e9
    who = f"{ranks} ranks on {several} hosts" if several > 1 else f"{ranks} ranks"
    speed = f"{1e6 * found['latency']:.0f} us for 8 bytes, {rate:.2f} GB/s for 8 MiB"
    findings = [ok("all-reduce", f"{who}: {speed}")]
    slowest = min(links, key=lambda link: link.bandwidth)
    typical = _middle([link.bandwidth for link in links])
    left, right = (
        f"{rank} ({hosts[rank]})" if several > 1 else f"{rank}" for rank in (slowest.left, slowest.right)
    )
    text = f"ranks {left} and {right}, {slowest.bandwidth / 1e9:.2f} GB/s"
    if slowest.bandwidth * _SLOW_PAIR < typical:
        advice = (
            f"The others have {typical / 1e9:.2f} GB/s: look at the cable, slot or host between these two."
        )
        return [*findings, warning("slowest pair", text, advice)]
    return [*findings, ok("slowest pair", text)]


def _pair(left: int, right: int, rank: int, message: Any, device: Any) -> float:
    """Seconds of one there and back between two ranks; 0 on all others."""
    import torch.distributed as dist

    dist.barrier()
    if rank not in (left, right):
        return 0.0
    other = right if rank == left else left

    def exchange() -> None:
        if rank == left:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    return _median(exchange, 5, device)


def _median(call: Any, times: int, device: Any) -> float:
    import time

    import torch

    seconds = []
    for _ in range(times + 2):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return _middle(seconds[2:])


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
