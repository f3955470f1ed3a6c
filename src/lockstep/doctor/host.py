"""What this host offers: processors, memory, interfaces, leftovers. Free of torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.doctor.finding import Finding, fault, ok, warning
from lockstep.launch.devices import usable_cores
from lockstep.launch.runs import find_runs

_GIB = 2**30
_LITTLE_SHARED, _LITTLE_DISK, _LITTLE_MEMORY = 64 << 20, 1 << 30, 1 << 30
_OLDEST_KERNEL = (5, 3)
"""The first Linux with pidfd, by which exactly the processes of a run are ended."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def look_at_host(environment: Mapping[str, str]) -> list[Finding]:
    """All findings that need no process group.

    Args:
        environment: of this process.
    """
    return [
        _system(),
        *_cores(environment),
        _memory(),
        _shared_memory(),
        *_folders(),
        *_interfaces(environment),
        _host_name(),
        *_left_over(),
    ]


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return warning(
            "system", found, "Only Linux ends a rank with its launcher by itself; use Linux for long runs."
        )
    kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if kernel < _OLDEST_KERNEL:
        return fault("system", found, "'lockstep stop' and 'clean' need Linux 5.3 or later.")
    return ok("system", found)


def _cores(environment: Mapping[str, str]) -> Iterator[Finding]:
    usable, all_cores = usable_cores(), os.cpu_count() or 1
    found = f"{usable} of {all_cores} cores usable"
    yield ok("processor", found)
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={threads} on {usable} cores",
            f"Give each rank at most {usable} threads, divided by the ranks of this host: --threads N.",
        )


def _memory() -> Finding:
    available = _meminfo().get("MemAvailable", 0)
    limit = memory_limit()
    found = f"{available / _GIB:.1f} GiB available"
    if limit is not None:
        found += f", limited to {limit / _GIB:.1f} GiB for this process and its children"
    if min(available, limit or available) < _LITTLE_MEMORY:
        return warning(
            "memory", found, "A rank alone takes about 0.25 GiB: end other programs or raise the limit."
        )
    return ok("memory", found)


def memory_limit() -> int | None:
    """The cgroup's limit in bytes, the smallest up the tree; None without one."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].rpartition("::")[2]
    except (OSError, IndexError):
        return None
    limits = []
    folder = Path("/sys/fs/cgroup") / path.lstrip("/")
    for level in (folder, *folder.parents):
        try:
            text = (level / "memory.max").read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=None)


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return warning("shared memory", "no /dev/shm", "Loader workers need it: use workers=0, or mount one.")
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm has {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free < _LITTLE_SHARED:
        advice = (
            "Loader workers pass batches through it: in a container give --shm-size=2g, or use workers=0."
        )
        return warning("shared memory", found, advice)
    return ok("shared memory", found)


def _folders() -> Iterator[Finding]:
    for subject, folder in (("temporary", Path(tempfile.gettempdir())), ("this folder", Path.cwd())):
        if not os.access(folder, os.W_OK | os.X_OK):
            yield fault(
                subject, f"{folder} cannot be written", "Choose another by TMPDIR, or --set run.directory=..."
            )
            continue
        free = shutil.disk_usage(folder).free
        found = f"{folder}, {free / _GIB:.1f} GiB free"
        if free < _LITTLE_DISK:
            yield warning(subject, found, "Checkpoints may not fit: free some space.")
        else:
            yield ok(subject, found)


def _interfaces(environment: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    yield ok("one host", "ranks of one host meet over loopback and shared memory; nothing listens elsewhere")
    for variable in _INTERFACE_VARIABLES:
        chosen = environment.get(variable)
        if chosen and chosen.lstrip("^=").split(",")[0] not in names:
            advice = f"Set it to one of {', '.join(names)}, or unset it."
            yield fault("interface", f"{variable}={chosen} is not on this host", advice)
    route = default_interface()
    others = [name for name in names if name != "lo"]
    if not others:
        yield ok("interface", "loopback only: this host can train alone, not with other hosts")
    elif route is None:
        advice = (
            f"For several hosts set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one of {', '.join(others)}."
        )
        yield warning("interface", f"{', '.join(others)}, none of them the default route", advice)
    else:
        yield ok("interface", f"{route} is the default route, of {', '.join(others)}")


def default_interface() -> str | None:
    """The interface of the default route; None without one."""
    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return None
    return next((line.split()[0] for line in lines if line.split()[1:2] == ["00000000"]), None)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = "One host does not need it. For several, give --master an address instead of a name."
        return warning("host name", f"{name} does not resolve", advice)
    return ok("host name", f"{name} is {address}")


def _left_over() -> Iterator[Finding]:
    left = [run for run in find_runs() if not run.is_supervised]
    for run in left:
        pids = ", ".join(str(process.pid) for process in run.processes()) or "none"
        found = f"run {run.run_id} was killed and left processes: {pids}"
        yield warning("left over", found, "End exactly these and remove what they hold: lockstep clean.")
    if not left:
        yield ok("left over", "nothing of earlier runs")


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
