"""Checks with torch: its version, backends and devices, and how fast ranks exchange data.

The exchange is timed over all ranks (an all-reduce) and for each pair of them alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import combinations
from typing import Any

from lockstep.doctor.host import CheckResult, fault, ok, warning
from lockstep.text import format_bytes

SMALL, LARGE = 8, 8 << 20
"""Bytes of the messages that measure latency and bandwidth."""
_SLOW_PAIR = 3.0
_OLDEST_TORCH = (2, 8)
_OPTIONAL = {
    "tensorboard": "No TensorBoard logs are written without it: pip install tensorboard.",
    "safetensors": "Checkpoints need it: pip install safetensors.",
}


def look_at_software() -> Iterator[CheckResult]:
    """Checks versions, backends and devices."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield fault("torch", f"import failed: {error}", "Reinstall torch: https://pytorch.org/get-started.")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{torch.__version__}, built for {built}"
    is_old = version < _OLDEST_TORCH
    yield fault("torch", found, "Install torch 2.8 or later.") if is_old else ok("torch", found)
    for package, advice in _OPTIONAL.items():
        try:
            yield ok(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield warning(package, "not installed", advice)
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    found, advice = ", ".join(backends) or "none", "Install a build of torch that has gloo."
    yield ok("backends", found) if "gloo" in backends else fault("backends", found, advice)
    yield from _devices()


def _devices() -> Iterator[CheckResult]:
    import torch

    if not torch.cuda.is_available():
        reason = "this torch has no CUDA" if not torch.version.cuda else "no driver or no device found"
        yield ok("devices", f"no GPU ({reason}), ranks compute on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        memory = f"{format_bytes(free, binary=True)} of {format_bytes(total, binary=True)}"
        found = f"{number}: {properties.name}, {memory} free"
        advice = "Another program uses its memory: see nvidia-smi and 'lockstep ps'."
        yield warning("devices", found, advice) if free < total / 2 else ok("devices", found)


def measure() -> dict[str, Any]:
    """Times all-reduces and the exchange of every pair, with the same result on every rank. Collective.

    Returns:
        ``latency`` and ``large`` (seconds of an all-reduce of 8 bytes and of 8 MiB), ``pairs`` as [left, right,
        seconds], and ``hosts``, the name of each rank's host.
    """
    import torch
    import torch.distributed as dist

    from lockstep.core.world import World, host_name
    from lockstep.distributed.collectives import gather_json
    from lockstep.distributed.process_group import open_process_group

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
        pairs = list(combinations(range(world.world_size), 2))
        own = [_pair(left, right, world.rank, large, device) for left, right in pairs]
        times = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        timed = [[*pair, seconds] for pair, seconds in zip(pairs, times.tolist())]
    return {**found, "pairs": timed, "hosts": hosts}


def judge_links(found: dict[str, Any]) -> list[CheckResult]:
    """Judges what ``measure`` returned: an all-reduce in numbers, and the slowest pair."""
    hosts = found["hosts"]
    ranks, several = len(hosts), len(set(hosts))
    if ranks < 2:
        return [ok("all-reduce", "one device, nothing to exchange")]
    pairs = [(2 * LARGE / seconds, left, right) for left, right, seconds in found["pairs"]]
    rate = 2 * (ranks - 1) / ranks * LARGE / found["large"]
    who = f"{ranks} ranks on {several} hosts" if several > 1 else f"{ranks} ranks"
    speed = f"{1e6 * found['latency']:.0f} us for 8 bytes, {format_bytes(rate)}/s for 8 MiB"
    findings = [ok("all-reduce", f"{who}: {speed}")]
    slowest, *between = min(pairs, key=lambda pair: pair[0])
    typical = statistics.median_high([bandwidth for bandwidth, _, _ in pairs])
    left, right = (f"{rank} ({hosts[rank]})" if several > 1 else f"{rank}" for rank in between)
    text = f"ranks {left} and {right}, {format_bytes(slowest)}/s"
    if slowest * _SLOW_PAIR >= typical:
        return [*findings, ok("slowest pair", text)]
    advice = f"Other pairs reach {format_bytes(typical)}/s. Check the cable, slot or host between these two."
    return [*findings, warning("slowest pair", text, advice)]


def _pair(left: int, right: int, rank: int, message: Any, device: Any) -> float:
    """Seconds of a round trip between two ranks; 0 on all others."""
    import torch.distributed as dist

    dist.barrier()
    if rank not in (left, right):
        return 0.0
    first, second = (dist.send, dist.recv) if rank == left else (dist.recv, dist.send)
    other = right if rank == left else left

    def exchange() -> None:
        first(message, other)
        second(message, other)

    return _median(exchange, 5, device)


def _median(call: Callable[[], object], times: int, device: Any) -> float:
    import torch

    seconds = []
    for _ in range(times + 2):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median_high(seconds[2:])
