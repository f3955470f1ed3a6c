"""Tells a rank that the kernel killed for want of memory from one that somebody killed, and what it held.

The kernel counts its OOM kills for each memory cgroup, and for the whole host; a rank that ends by SIGKILL while the
count of this process's cgroup has risen is taken for one of them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """The memory of the ranks of one host, as their supervisor sees it."""

    def __init__(self) -> None:
        self._kills = oom_kills()
        self._held: dict[int, int] = {}

    def look(self, processes: Mapping[int, int]) -> None:
        """Notes how much each rank holds.

        Args:
            processes: process id of each rank that has not ended.
        """
        for rank, pid in processes.items():
            held = _resident(pid)
            if held:
                self._held[rank] = held

    def killer_of(self, rank: int, code: int) -> str:
        """Who killed a rank of that exit code, as in "killed by ..."; empty unless it was the OOM killer."""
        if code != -signal.SIGKILL or oom_kills() <= self._kills:
            return ""
        held = f"; it last held {self._held[rank] / 1e9:.1f} GB" if rank in self._held else ""
        return f"the OOM killer, which ends a process when memory runs out{held}"


def oom_kills(process: str = "self") -> int:
    """How often the OOM killer has struck in the memory cgroup of a process, or on a host without any; 0: unknown."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            files = {
                "memory": _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control",
                "": _CGROUPS / path.lstrip("/") / "memory.events",
            }
            counted = _count(files[controllers]) if controllers in files else None
            if counted is not None:
                return counted
    return _count(Path("/proc/vmstat")) or 0


def _count(file: Path) -> int | None:
    with suppress(OSError):
        found = _COUNT.search(file.read_text())
        return int(found[1]) if found else None
    return None


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if there is none."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0
