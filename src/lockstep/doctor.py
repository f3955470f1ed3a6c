"""Checks the machine before training: each result is ok, a warning or a fault, and says what to do.

``look_at_host``      without torch: processors, memory, folders, interfaces, host name, leftovers
``look_at_software``  versions of torch and other packages, backends, devices
``measure``           how fast ranks exchange data: all of them (an all-reduce), and each pair alone
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from lockstep.core.world import usable_cores
from lockstep.distributed.network import addresses, data_interface, interface_towards
from lockstep.errors import ConfigError
from lockstep.launch.runs import find_runs
from lockstep.text import format_bytes


class Grade(Enum):
    """The severity of a result."""

    OK = "ok"
    WARNING = "warning"
    """Training works, perhaps not well."""
    FAULT = "fault"
    """Training will fail."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report: the subject, what was found, and what to do about it."""

    grade: Grade
    subject: str
    found: str
    advice: str = ""
    """Empty where there is nothing to do."""

    @property
    def text(self) -> str:
        """The line for the terminal."""
        line = f"{self.grade.value:8} {self.subject:14} {self.found}"
        return f"{line}\n{'':24}-> {self.advice}" if self.advice else line


ok, warning, fault = (partial(CheckResult, grade) for grade in Grade)

_LITTLE_SHARED, _LITTLE_DISK, _LITTLE_MEMORY = 64 << 20, 1 << 30, 1 << 30
_OLDEST_KERNEL = (5, 3)
"""The first Linux with pidfd, through which runs are ended."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def look_at_host(
    environment: Mapping[str, str], master: tuple[str, int] | None = None, interface: str = ""
) -> list[CheckResult]:
    """Runs all checks of this host, with the environment of this process.

    Args:
        environment: of this process.
        master: host and port of the host of node-rank 0, if the run has several hosts.
        interface: the one asked for with ``--interface``.
    """
    return [
        _system(),
        *_cores(environment),
        _memory(),
        _shared_memory(),
        *_folders(),
        *_interfaces(environment),
        _way_to_other_hosts() if master is None else _way_to_master(master, interface, environment),
        _host_name(),
        *_left_over(),
    ]


def _system() -> CheckResult:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        advice = "Lockstep is tested on Linux; elsewhere a rank that hangs may outlive a launcher that was killed."
        return warning("system", found, advice)
    kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if kernel < _OLDEST_KERNEL:
        return fault("system", found, "'lockstep stop' and 'lockstep clean' need Linux 5.3 or later.")
    return ok("system", found)


def _cores(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    usable = usable_cores()
    yield ok("processor", f"{usable} of {os.cpu_count() or 1} cores usable")
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        advice = f"Set --threads N so that all ranks of this host together have at most {usable} threads."
        yield warning("threads", f"OMP_NUM_THREADS={threads} on {usable} cores", advice)


def _memory() -> CheckResult:
    available = psutil.virtual_memory().available
    limit = memory_limit()
    found = f"{format_bytes(available, binary=True)} available"
    if limit is not None:
        found += f", limited to {format_bytes(limit, binary=True)} for this process and its children"
    if min(available, limit or available) >= _LITTLE_MEMORY:
        return ok("memory", found)
    advice = "Each rank needs at least about 0.25 GiB. End other programs or raise the limit."
    return warning("memory", found, advice)


def memory_limit() -> int | None:
    """The lowest memory limit of the cgroup and its parents, in bytes; None without one."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].rpartition("::")[2]
    except (OSError, IndexError):
        return None
    limits = []
    folder = Path("/sys/fs/cgroup") / path.lstrip("/")
    for level in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # there is no limit here, or it is "max"
            limits.append(int((level / "memory.max").read_text()))
    return min(limits, default=None)


def _shared_memory() -> CheckResult:
    if not Path("/dev/shm").is_dir():
        return warning("shared memory", "no /dev/shm", "Loader workers need it. Mount one, or set workers=0.")
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm has {format_bytes(usage.free, binary=True)} of {format_bytes(usage.total, binary=True)} free"
    if usage.free < _LITTLE_SHARED:
        advice = "Loader workers send batches through it. In a container set --shm-size=2g, or set workers=0."
        return warning("shared memory", found, advice)
    return ok("shared memory", found)


def _folders() -> Iterator[CheckResult]:
    for subject, folder, setting in (
        ("temporary", Path(tempfile.gettempdir()), "TMPDIR"),
        ("this folder", Path.cwd(), "--set run.directory=..."),
    ):
        if not os.access(folder, os.W_OK | os.X_OK):
            yield fault(subject, f"{folder} is not writable", f"Set another with {setting}")
            continue
        free = shutil.disk_usage(folder).free
        found = f"{folder}, {format_bytes(free, binary=True)} free"
        advice = "Checkpoints may not fit. Free some space."
        yield warning(subject, found, advice) if free < _LITTLE_DISK else ok(subject, found)


def _interfaces(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    names = [name for _, name in socket.if_nameindex()]
    yield ok("one host", "ranks of one host connect over loopback, nothing listens elsewhere")
    for variable in _INTERFACE_VARIABLES:
        chosen = environment.get(variable)
        if chosen and chosen.lstrip("^=").split(",")[0] not in names:
            advice = f"Set it to one of {', '.join(names)}, or unset it."
            yield fault("interface", f"{variable}={chosen} is not on this host", advice)


def _way_to_other_hosts() -> CheckResult:
    """The interface that a run on several hosts would use by itself."""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not others:
        return ok("interface", "loopback only, this host cannot train together with other hosts")
    route = _default_interface()
    if route is None:
        advice = "A run on several hosts takes the one that leads to --master; choose another with --interface."
        return warning("interface", f"{', '.join(others)}, none has the default route", advice)
    return ok("interface", f"{route} has the default route, of {', '.join(others)}")


def _way_to_master(master: tuple[str, int], asked: str, environment: Mapping[str, str]) -> CheckResult:
    """The interface that this run uses: the one that was asked for, else the one that leads to ``--master``."""
    known = addresses()
    try:
        name = data_interface(asked, interface_towards(*master, known), known, environment)
    except ConfigError as error:
        return fault("interface", str(error), "Correct --master or --interface.")
    return ok("interface", f"{name}, for the data of a run whose --master is {master[0]}")


def _default_interface() -> str | None:
    """The interface of the default route; None without one."""
    with suppress(OSError):
        routes = map(str.split, Path("/proc/net/route").read_text().splitlines()[1:])
        return next((route[0] for route in routes if route[1:2] == ["00000000"]), None)
    return None


def _host_name() -> CheckResult:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = "A single host does not need it. For several, give --master an IP address."
        return warning("host name", f"{name} does not resolve", advice)
    return ok("host name", f"{name} is {address}")


def _left_over() -> Iterator[CheckResult]:
    left = [run for run in find_runs() if not run.is_supervised]
    for run in left:
        pids = ", ".join(str(process.pid) for process in run.processes()) or "none"
        found = f"run {run.run_id} was killed and left processes: {pids}"
        yield warning("left over", found, "End them and remove their run directory: lockstep clean.")
    if not left:
        yield ok("left over", "nothing from earlier runs")


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
    from lockstep.runtime.devices import choose_device, collectives_for

    world = World.from_environment()
    device = choose_device(world)
    if world.world_size == 1:
        return {"latency": 0.0, "large": 0.0, "pairs": [], "hosts": [host_name()]}
    with open_process_group(world, backend=collectives_for(device)):
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
    speed = f"{1e6 * found['latency']:.0f} us for 8 bytes, {1e3 * found['large']:.3g} ms for 8 MiB"
    findings = [ok("all-reduce", f"{who}: {speed} ({format_bytes(rate)}/s from each rank to the next in a ring)")]
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
    return _median(lambda: (first(message, other), second(message, other)), 5, device)


def _median(call: Callable[[], object], times: int, device: Any) -> float:
    from lockstep.runtime.devices import wait_for

    seconds = []
    for _ in range(times + 2):
        begin = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median_high(seconds[2:])
