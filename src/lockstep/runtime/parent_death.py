"""Ties a process to its parent: when the parent ends for any reason, the kernel kills the child.

Linux sends the signal when the *thread* that created the child ends, so a child must be created by a thread
that outlives it; Lockstep forks from main threads only. Other systems have no such signal: there ``arm`` only checks
that the parent is still the expected one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.core.world import World
from lockstep.runtime.process_handle import ProcessHandle, all_pids, is_over

_PR_SET_PDEATHSIG = 1
_PASSES = 3
_PAUSE = 0.5
_MPI_FORKS_IN_THREADS = 32
"""With so many ranks on a host Open MPI forks them in threads (``odls_base_cutoff``), which end before the ranks."""


def arm(expected_parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel, or a thread where it is not Linux, for a signal to this process when ``expected_parent`` ends.

    If the parent has ended before this call, the process ends at once, because the signal would never come.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    else:
        threading.Thread(target=_watch_parent, args=(expected_parent, number), daemon=True).start()
    if os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(expected_parent: int, number: signal.Signals) -> None:
    """Sends the signal to this process once its parent has ended: the kernel does that only on Linux."""
    while os.getppid() == expected_parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), number)


def end_leftovers(run_directory: str, session: int = 0) -> None:
    """Kills the processes of a run that its ranks have started, and the ranks themselves if any is left.

    They are those whose environment has the run directory, and those of the fork server's session, whatever they have
    made of their environment. The caller makes sure that ``session``, a process id, is not used again. A process that
    has left the session and has another environment is not found.
    """
    if not Path(run_directory).is_absolute():
        raise ValueError(f"the run directory is {run_directory!r}, not a path from the root")
    for _ in range(_PASSES):  # a process may have been forked while the others were looked at
        found = []
        with suppress(OSError):  # no descriptor is left, so nobody can be looked at
            found = list(_belonging(run_directory, session))
        for handle in found:
            with suppress(OSError):
                handle.send(signal.SIGKILL)
            handle.close()
        if not found:
            return


def has_processes(run_directory: str) -> bool:
    """True if a process has the run directory in its environment."""
    found = list(_belonging(run_directory, 0))
    for handle in found:
        handle.close()
    return bool(found)


def _belonging(run_directory: str, session: int) -> Iterator[ProcessHandle]:
    """Yields the processes of this run directory or session that have not ended; the caller closes the handles."""
    for pid in all_pids():
        if pid in (os.getpid(), session):
            continue
        try:
            handle = ProcessHandle(pid)
        except ProcessLookupError:
            continue
        with suppress(OSError, psutil.Error):
            process = psutil.Process(pid)
            is_marked = process.environ().get("LOCKSTEP_RUN_DIRECTORY") == run_directory
            if (is_marked or 0 < session == os.getsid(pid)) and not is_over(process):
                yield handle
                continue
        handle.close()


def tie_to_launcher(world: World) -> None:
    """Ties a rank to the torchrun or mpirun that started it; other launchers kill their ranks themselves."""
    if world.launcher == "torchrun" or (world.launcher == "mpi" and world.local_world_size < _MPI_FORKS_IN_THREADS):
        arm(os.getppid())


def die_with_parent() -> None:
    """Ties a ``multiprocessing`` child to the process that asked for it."""
    arm(os.getppid())
    asked_by = multiprocessing.parent_process()
    if asked_by is not None and asked_by.pid is not None and not psutil.pid_exists(asked_by.pid):
        os.kill(os.getpid(), signal.SIGKILL)


def arm_future_children() -> None:
    """Ties every child that this process forks from its main thread from now on to this process.

    Covers loader workers that a user's script starts, also one that hangs in ``__getitem__``. Children of other
    threads are not tied (they would end with their thread), nor are grandchildren.
    """
    owner = os.getpid()
    from_main_thread = False

    def note_thread() -> None:
        nonlocal from_main_thread
        from_main_thread = threading.current_thread() is threading.main_thread()

    def arm_child() -> None:
        if from_main_thread and os.getppid() == owner:
            arm(owner)

    os.register_at_fork(before=note_thread, after_in_child=arm_child)
