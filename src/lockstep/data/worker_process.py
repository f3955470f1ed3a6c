"""Worker processes of a loader: the data set that they read, their signals, and reports on a stuck or lost one."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shutil
import signal
import stat
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from lockstep.data.reader import GroupedBatch, Request, SampleReader
from lockstep.data.shared_buffers import SharedBuffer, SharedBuffers, WorkerResult
from lockstep.errors import DataError, RankError
from lockstep.runtime.parent_death import die_with_parent
from lockstep.runtime.stack_dump import Mark, has_mark, unescaped
from lockstep.text import format_bytes

_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
_TELL_STACK = signal.SIGUSR2
_ANSWER_WITHIN = 1.0


class WorkerStacks:
    """Lets each worker write its Python stack into a file when it is asked, also while it is stuck."""

    def __init__(self, workers: int) -> None:
        opened = ExitStack()
        files = [opened.enter_context(TemporaryFile()) for _ in range(workers)]  # noqa: SIM115 - the stack closes them
        self._files = [file.fileno() for file in files]
        weakref.finalize(self, opened.close)

    def prepare_worker(self, worker: int) -> None:
        """Prepares a worker: it ends with the rank, and leaves signals to the rank."""
        die_with_parent()
        _open_files_anew()
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
                told += f"\nWorker {number} (pid {worker.pid}) does not respond; it may be waiting for a device."
            elif has_mark(stack, Mark.READS_SAMPLES):
                told += f"\nWorker {number} (pid {worker.pid}) reads; {stack.strip()}"
        return told


def unwatch(iterator: Any) -> None:
    """Stops torch from reporting the death of its iterator's workers by itself.

    torch would raise a RuntimeError wherever the training process happens to be at that moment, in the middle of an
    optimizer step for example. The loader checks its workers whenever it waits for them.
    """
    for _ in range(2):  # a report that is under way may arrive here, once
        with suppress(RuntimeError):
            if iterator._worker_pids_set:
                iterator._worker_pids_set = False
                signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # not public


def explain_lost_worker(workers: Sequence[BaseProcess], error: Exception, reading: str) -> RankError:
    """The ``RankError`` for a worker that was killed or exited, with the memory that is free."""
    ended = wait([worker.sentinel for worker in workers], timeout=_ANSWER_WITHIN)
    lost = [_fate(worker) for worker in workers if worker.sentinel in ended]
    what = f"a data loader worker {lost[0]}" if lost else f"the data loader failed ({type(error).__name__}: {error})"
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

    def obey() -> None:
        while True:
            if signal.sigwaitinfo({number}).si_pid == parent:
                os._exit(0)

    threading.Thread(target=obey, name="lockstep-sigterm", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, {number})


def _open_files_anew() -> None:
    """Gives this process places of its own in the files that it has inherited open for reading.

    A data set may keep one open. Workers that share its place would move it while another reads.
    """
    folder = Path("/proc/self/fd")
    for link in list(folder.iterdir()) if folder.is_dir() else ():
        with suppress(OSError):
            number = int(link.name)
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
                continue
            opened = os.open(link, flags)
            os.lseek(opened, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(opened, number, inheritable=os.get_inheritable(number))
            os.close(opened)


def _wait_for_text(file: int, start: int, deadline: float) -> str:
    while os.fstat(file).st_size == start and time.monotonic() < deadline:
        time.sleep(0.01)  # the worker's signal handler cannot notify; it can only write
    return unescaped(os.pread(file, 1 << 16, start).decode(errors="replace"))


def _memory() -> str:
    parts = []
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        free, total = (format_bytes(count, binary=True) for count in (usage.free, usage.total))
        parts.append(f"/dev/shm has {free} of {total} free")
    parts.append(f"{format_bytes(psutil.virtual_memory().available, binary=True)} of memory are available")
    return f"Now {' and '.join(parts)}."


@dataclass(frozen=True)
class Failure:
    """A worker's error as text, since not every exception can be pickled."""

    message: str
    trace: str


class InWorker(Exception):
    """Carries the traceback of the worker, as text, into the traceback of the training process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class WorkerDataset(Dataset[Any]):
    """The data set of torch's loader: a request is its index, and what was read its item."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._buffers: SharedBuffers | None = None
        self.buffer: SharedBuffer | None = None
        """In a worker, while it reads: the memory that its tensors are going to be sent in."""

    def __getitem__(self, request: Request) -> GroupedBatch | WorkerResult | Failure:
        buffers, worker = self._buffers, get_worker_info()
        self.buffer = buffers.buffer(worker.id) if buffers is not None and worker is not None else None
        try:
            found = self._reader.answer(request)
            return found if self.buffer is None else self.buffer.answer(found)
        except DataError as error:
            return Failure(str(error), traceback.format_exc())
        finally:
            self.buffer = None

    def open(self, workers: int, each: int, gpus: Sequence[torch.device]) -> None:
        """Makes buffers for workers that are about to be forked, where the process may; see ``SharedBuffers``."""
        with suppress(OSError):
            self._buffers = SharedBuffers(workers, each, gpus)

    def opened(self, answer: GroupedBatch | WorkerResult) -> GroupedBatch:
        """An answer's micro-batches."""
        if self._buffers is not None:
            self._buffers.free()
        if isinstance(answer, GroupedBatch):
            return answer
        assert self._buffers is not None
        return self._buffers.open(answer)

    def close(self) -> None:
        """Releases the buffers. Tensors in them stay."""
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
