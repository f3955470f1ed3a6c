"""A process of this host, signalled and waited for without taking a later process with the same id for it."""

from __future__ import annotations

import os
import select
import signal
import time
from types import TracebackType
from typing import Self

import psutil

from lockstep.errors import ConfigError

_PAUSE = 0.02


def all_pids() -> list[int]:
    """The ids of this host's processes; ``ConfigError`` where they cannot be looked at."""
    try:
        return list(psutil.pids())
    except (OSError, IndexError) as error:  # the latter is psutil's of an empty /proc
        raise hidden(error) from error


def hidden(error: Exception) -> ConfigError:
    """The error where processes cannot be looked at."""
    why = getattr(error, "strerror", "/proc is empty")
    return ConfigError(f"Processes cannot be seen: {why}. Mount /proc, or raise the limit of open files (ulimit -n).")


class ProcessHandle:
    """A process that may end at any moment: on Linux a pidfd, elsewhere its id and the time at which it began.

    Args:
        pid: of the process.

    Raises:
        ProcessLookupError: there is none.
        OSError: no file descriptor is left.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        self._process: psutil.Process | None = None
        if self._descriptor < 0:
            try:
                self._process = psutil.Process(pid)
            except psutil.NoSuchProcess as error:
                raise ProcessLookupError(f"there is no process {pid}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, number: int) -> None:
        """Sends a signal; ``ProcessLookupError`` if the process has ended."""
        if self._process is None:
            signal.pidfd_send_signal(self._descriptor, number)
            return
        try:
            self._process.send_signal(number)
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(f"process {self._process.pid} has ended") from error

    def has_ended(self, within: float) -> bool:
        """Waits at most ``within`` seconds for the process to end; returns whether it has, reaped or not."""
        if self._process is None:
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(1000 * within))
        deadline = time.monotonic() + within
        while not is_over(self._process):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)  # there is nothing to wait on for a process that is not a child
        return True

    def close(self) -> None:
        """Gives the descriptor back; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_over(process: psutil.Process) -> bool:
    """Returns True if a process has ended, also where its parent has not asked for its exit status yet."""
    try:
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
