"""The rank's end of a benchmark: trains when told, and sleeps between rounds.

One round, told by a line of JSON over a socket:

    harness   {"warm_up": 2, "steps": 12} ->                                {"stop": true} ->
    rank                                     2 steps | 12 steps, timed ->   |  asleep      |  leaves its loop
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path


def forget_peak() -> int:
    """Starts the kernel's record of this process's peak memory anew; returns the bytes that it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """The most bytes of memory that this process has held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Gate:
    """Counts the steps of a round and sleeps in a read until the next: an idle side uses no CPU."""

    def __init__(self, control: Path, rank: int, before: int = 0) -> None:
        """Connects to the harness; ``before`` is what ``forget_peak`` gave, for the memory that training takes."""
        self._before = before
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(control))
        self._lines = self._socket.makefile("r")
        self._send({"rank": rank})
        self._done = self._warm_up = self._steps = 0
        self._start = 0.0
        self._wait()

    def step_done(self) -> bool:
        """Called after every optimizer step; false when the loop should end."""
        self._done += 1
        if self._done == self._warm_up:
            self._start = time.monotonic()
        if self._done < self._warm_up + self._steps:
            return True
        self._send({"seconds": time.monotonic() - self._start, "peak": peak_memory() - self._before})
        return self._wait()

    def _wait(self) -> bool:
        line = self._lines.readline()
        order = json.loads(line) if line else {"stop": True}
        if order.get("stop"):
            return False
        self._done, self._warm_up, self._steps = 0, order["warm_up"], order["steps"]
        self._start = time.monotonic()
        return True

    def _send(self, message: dict[str, float]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
