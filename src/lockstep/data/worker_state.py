"""What is known about loader workers: how they are prepared, where a stuck one stands, why one was lost."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import signal_handling

from lockstep.errors import RankError
from lockstep.launch.parent_death import die_with_parent

_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
_TELL_STACK = signal.SIGUSR2
_ANSWER_WITHIN = 1.0


class WorkerStacks:
    """Lets each worker write its Python stack into a file when it is asked, also while it is stuck."""

    def __init__(self, workers: int) -> None:
        self._files = [_nameless_file() for _ in range(workers)]
        weakref.finalize(self, _close_all, self._files)

    def prepare_worker(self, worker: int) -> None:
        """Runs in each worker before it reads: ties it to the rank, and leaves the signals to the rank."""
        die_with_parent()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        _obey_only_the_parent(signal.SIGTERM)
        faulthandler.register(_TELL_STACK, file=self._files[worker], all_threads=False, chain=False)

    def report(self, workers: Sequence[BaseProcess]) -> str:
        """The stacks of those workers (all of them are given, in order) that are in the middle of reading."""
        starts = [os.fstat(file).st_size for file in self._files]
        asked = [worker for worker in workers if worker.pid is not None and worker.is_alive()]
        for worker in asked:
            os.kill(worker.pid or 0, _TELL_STACK)
        deadline = time.monotonic() + _ANSWER_WITHIN
        told = ""
        for number, worker in enumerate(workers):
            stack = _wait_for_text(self._files[number], starts[number], deadline) if worker in asked else ""
            if not stack:
                told += f"\nWorker {number} (pid {worker.pid}) does not answer; it may wait for a device."
            elif "reader.py" in stack:
                told += f"\nWorker {number} (pid {worker.pid}) reads; {stack.strip()}"
        return told


@contextmanager
def signals_held() -> Iterator[None]:
    """Holds signals back while workers are forked: they inherit that, until each has decided what it obeys."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED | {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unwatch(iterator: Any) -> None:
    """Stops torch from reporting the death of its iterator's workers by itself.

    torch would raise a RuntimeError wherever the training process happens to be at that moment, in the middle of an
    optimizer step for example. The loader looks after its workers whenever it waits for them.
    """
    for _ in range(2):  # a report that is under way may arrive here, once
        with suppress(RuntimeError):
            if iterator._worker_pids_set:
                iterator._worker_pids_set = False
                signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # not public


def explain_loss(workers: Sequence[BaseProcess], error: Exception, reading: str) -> RankError:
    """The ``RankError`` for a worker that was killed or left, with the state of the memory it needs."""
    ended = wait([worker.sentinel for worker in workers], timeout=_ANSWER_WITHIN)
    lost = [_fate(worker) for worker in workers if worker.sentinel in ended]
    what = (
        f"a data loader worker {lost[0]}"
        if lost
        else f"the data loader failed ({type(error).__name__}: {error})"
    )
    return RankError(
        f"While the loader read {reading}, {what}. {_memory()} "
        "A worker that is killed has usually run out of memory: use fewer workers or a smaller prefetch."
    )


def _fate(worker: BaseProcess) -> str:
    worker.join(_ANSWER_WITHIN)  # it has closed its files, and ends at once
    code = worker.exitcode or 0
    if code >= 0:
        return f"(pid {worker.pid}) ended with exit code {code}"
    return f"(pid {worker.pid}) was killed by {signal.Signals(-code).name}"


def _obey_only_the_parent(number: signal.Signals) -> None:
    """Ends this process on a signal of its parent, and ignores the same signal of anybody else.

    A cluster sends SIGTERM to every process of a job. The rank then finishes its step and saves, for which it
    needs its workers; torch on the other hand ends a worker that does not leave by itself with SIGTERM.
    """
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def wait() -> None:
        while True:
            if signal.sigwaitinfo({number}).si_pid == parent:
                os._exit(0)

    threading.Thread(target=wait, name="lockstep-sigterm", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, {number})


def _nameless_file() -> int:
    descriptor, path = tempfile.mkstemp(prefix="lockstep-worker-")
    Path(path).unlink()
    return descriptor


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _wait_for_text(file: int, start: int, deadline: float) -> str:
    while os.fstat(file).st_size == start and time.monotonic() < deadline:
        time.sleep(0.01)  # the worker's signal handler cannot notify; it can only write
    return os.pread(file, 1 << 16, start).decode(errors="replace")


def _memory() -> str:
    parts = []
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        parts.append(f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if available:
            parts.append(f"{int(available[1]) / 2**20:.1f} GiB of memory are available")
    return f"Now {' and '.join(parts)}." if parts else ""
