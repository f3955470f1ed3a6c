"""Memory that CPU ranks of one host share, and counters in it that they wait for.

Ranks wait with Linux's futex (Franke, Russell and Kirkwood 2002): sleep only if the word still has the value that was
seen, and be woken by the process that changes it. Where there is a core for every waiter, a waiter first polls for some
milliseconds and yields in between. A sleeper is woken on the core of its waker, so two ranks that sleep in turn can end
up sharing a core for good while another stays idle (measured as steps of twice the time); the scheduler moves one that
stays awake.

The memory belongs to no file: the first rank opens it anonymously and the others reach it through /proc, so nothing is
left behind however the ranks end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.runtime.stack_dump import Mark, stack_marker
from lockstep.text import format_bytes

CACHE_LINE = 64
_SYSCALL = {"x86_64": 202}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_NUMBERS = 1 << 32
_LOOK_SECONDS = 20e-6
_YIELD_SECONDS = 5e-3
_SLEEP_SECONDS = 0.05


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Returns whether this machine has the system call, and makes stores visible in the order they were made."""
    return platform.system() == "Linux" and hasattr(os, "memfd_create") and platform.machine() in _SYSCALL


class Word:
    """A 32-bit counter in writable shared memory, aligned to four bytes, that one process advances."""

    def __init__(self, memory: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _SYSCALL[platform.machine()]

    @property
    def value(self) -> int:
        """The counter as it stands."""
        return self._word.value

    def advance(self) -> None:
        """Adds one, without waking anyone. Only the owner may call it."""
        self._word.value += 1

    def wake(self) -> None:
        """Wakes everyone who waits for this counter."""
        self._call(self._number, self._address, _WAKE, _ALL, None, None, 0)

    @stack_marker(Mark.WAITS_FOR_EXCHANGE)
    def is_behind(self, reached: int) -> bool:
        """True until the counter has come to ``reached``."""
        return _is_before(self._word.value, reached)

    @stack_marker(Mark.WAITS_FOR_EXCHANGE)
    def wait_until(self, reached: int, deadline: float, *, stay_awake: bool = False) -> bool:
        """Waits until the counter is at least ``reached``; false if ``deadline`` (of ``time.monotonic``) passes.

        To ``stay_awake``, where there is a core for every waiter, is to sleep only after some milliseconds.
        """
        began = time.monotonic()
        while self.is_behind(reached) and time.monotonic() < began + _LOOK_SECONDS:
            pass
        while stay_awake and self.is_behind(reached) and time.monotonic() < began + _YIELD_SECONDS:
            os.sched_yield()
        while _is_before(seen := self._word.value, reached):
            if time.monotonic() > deadline:
                return False
            limit = _TimeSpec(0, int(_SLEEP_SECONDS * 1e9))
            self._call(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
        return True


@stack_marker(Mark.WAITS_FOR_EXCHANGE)
def _is_before(value: int, reached: int) -> bool:
    """Compares counts that are less than 2^31 apart, the first modulo 2^32."""
    return (value - reached) % _NUMBERS >= _NUMBERS // 2


def can_share_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether all ranks are on one host and can share memory. Collective."""
    if device.type != "cpu":
        return False
    seen = gather_json(host_identity(), group, device)
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
    """Zeroed memory that all ranks of the group map; the first rank opens it. Collective.

    ``ConfigError`` where a limit of this process does not allow that.
    """
    first = dist.get_rank(group) == 0
    descriptor = -1
    try:
        if first:
            descriptor = os.memfd_create("lockstep-memory", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        owner, number = gather_json([os.getpid(), descriptor], group, torch.device("cpu"))[0]
        if not first:
            descriptor = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        raise ConfigError(
            f"Ranks of this host share {format_bytes(size)} of memory, and that was refused: {error.strerror}. Raise "
            "the limits on files and memory (ulimit -f, -n and -v)."
        ) from error
    dist.barrier(group=group)
    os.close(descriptor)
    return memory


def _can_open(owner: int, descriptor: int) -> bool:
    try:
        os.close(os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def host_identity() -> str:
    """Equal for two processes of one host, that see each other under /proc; empty where memory cannot be shared.

    What has a network of its own counts as a host of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path("/proc/self/ns", kind).readlink() for kind in ("pid", "net")]
    except OSError:
        return ""
    return f"{boot} {spaces} {os.getuid()}" if is_available() else ""
