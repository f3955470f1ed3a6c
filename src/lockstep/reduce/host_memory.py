"""Memory that the processes of one host share, and whether they can.

It belongs to no file: it is an anonymous one that the first rank opens and the others reach through /proc, so nothing
is left behind whatever kills the ranks.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.collectives import gather_json
from lockstep.reduce import futex


def can_share_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks are on one host and can share memory. Collective."""
    if device.type != "cpu":
        return False
    seen = gather_json(_host_identity(), group, device)
    if not all(host and host == seen[0] for host in seen):
        return False
    first = dist.get_rank(group) == 0
    probe = os.memfd_create("lockstep-probe", os.MFD_CLOEXEC) if first else -1
    owner, number = gather_json([os.getpid(), probe], group, device)[0]
    reached = gather_json(first or _can_open(owner, number), group, device)
    if first:
        os.close(probe)
    return all(reached)


def share_memory(size: int, group: dist.ProcessGroup) -> mmap.mmap:
    """Zeroed memory that all ranks of the group map; the first rank opens it. Collective."""
    first = dist.get_rank(group) == 0
    descriptor = -1
    if first:
        descriptor = os.memfd_create("lockstep-reduce", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
    owner, number = gather_json([os.getpid(), descriptor], group, torch.device("cpu"))[0]
    if not first:
        descriptor = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(descriptor, size)
    dist.barrier(group=group)
    os.close(descriptor)
    return memory


def _can_open(owner: int, descriptor: int) -> bool:
    try:
        os.close(os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _host_identity() -> str:
    """Equal for two processes of one host, that see each other under /proc; empty where memory cannot be shared.

    What has a network of its own counts as a host of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path("/proc/self/ns", kind).readlink() for kind in ("pid", "net")]
    except OSError:
        return ""
    return f"{boot} {spaces} {os.getuid()}" if futex.is_available() and hasattr(os, "memfd_create") else ""
