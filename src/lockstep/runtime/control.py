"""The flags that the supervisor and all ranks of a run share, in a memory-mapped file.

control:  stop reason, whether any rank polls it, whether the supervisor is ending the run (a byte each)
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

from lockstep.core.atomic import descriptor_of


def map_file(path: Path, size: int) -> mmap.mmap:
    """Maps the first ``size`` bytes of a file, which is created if it does not exist; ``OSError`` if there is no room.

    The room is taken at once, because a write to a mapped page for which there is none would kill the process (SIGBUS).
    """
    with descriptor_of(path, os.O_RDWR | os.O_CREAT) as descriptor:
        while (held := os.fstat(descriptor).st_size) < size:  # where room is short, a part is written first
            os.pwrite(descriptor, bytes(size - held), held)
        return mmap.mmap(descriptor, size)


_SIZE = 4096
_REASON, _POLLED, _ENDING = 0, 1, 2  # bytes of the control file


class StopReason(IntEnum):
    """The reason why ranks are asked to stop."""

    NONE = 0
    INTERRUPTED = 130
    """Ctrl-C: stop at the next step boundary; the exit code of a rank that did."""
    PREEMPTED = 75
    """Preemption: save, stop, run again later; the exit code of a rank that did."""


_REASONS = {int(reason): reason for reason in StopReason}  # every step looks one up; faster than the enum


class Stopped(SystemExit):
    """Raised by a rank that stopped because it was asked to; the reason is the exit code."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(int(reason))
        self.reason = reason


class Control:
    """The flags that the supervisor and all ranks of a run share.

    Args:
        directory: the run directory; without one the flags belong only to this process.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._map = mmap.mmap(-1, _SIZE) if directory is None else map_file(control_file(directory), _SIZE)

    @property
    def reason(self) -> StopReason:
        """The reason why the ranks are asked to stop."""
        return _REASONS.get(self._map[_REASON], StopReason.NONE)  # user code may have written to the page

    def request_stop(self, reason: StopReason) -> None:
        """Asks every rank to stop; an interrupt overrides a preemption, otherwise the first reason is kept."""
        if self.reason is not StopReason.INTERRUPTED:
            self._map[_REASON] = int(reason)

    @property
    def polled(self) -> bool:
        """True if any rank polls the stop flag."""
        return bool(self._map[_POLLED])

    @polled.setter
    def polled(self, polled: bool) -> None:
        self._map[_POLLED] = polled

    @property
    def ending(self) -> bool:
        """True if the supervisor is ending the run: SIGTERM then means "exit now", not "save and stop"."""
        return bool(self._map[_ENDING])

    @ending.setter
    def ending(self, ending: bool) -> None:
        self._map[_ENDING] = ending

    def close(self) -> None:
        """Unmaps the file."""
        self._map.close()


def control_file(directory: Path) -> Path:
    """The control file of a run."""
    return directory / "control"
