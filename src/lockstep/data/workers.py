"""Reads micro-batches in worker processes, ahead of the training process.

torch's ``DataLoader`` moves the requests and the tensors; what to read is decided here, a micro-batch per
request, so the number of workers changes who reads and never what. Workers stay over the epochs, leave Ctrl-C
and a cluster's SIGTERM to the rank (which finishes its step and saves), and end with the rank however it
ends.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.data.answering import Failure, InWorker, Reads
from lockstep.data.inline import Request
from lockstep.data.reader import SampleReader
from lockstep.data.together import Together
from lockstep.data.worker_state import WorkerStacks, explain_loss, signals_held, unwatch
from lockstep.errors import DataError, StallError

_LOOK_EVERY = 1.0
"""Seconds between two looks at the workers while nothing comes; a dead one is found within this time."""

_FAILED = (RuntimeError, OSError, EOFError)
"""What torch raises, depending on where a worker was when it died, or that a time limit is over."""


class WorkerReading:
    """Worker processes that read the micro-batches of one data set.

    Args:
        reader: reads one micro-batch; used in the workers only.
        workers: number of processes, at least 1.
        ahead: requests each worker may be ahead of what was asked for.
        at_a_time: how many micro-batches of a step one request should ask for.
        pin_memory: deliver tensors in page-locked memory.
        timeout: seconds to wait for the answer to one request before the loader counts as stuck.
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        workers: int,
        ahead: int = 2,
        at_a_time: int = 1,
        pin_memory: bool = False,
        timeout: float = 120.0,
    ) -> None:
        self.at_a_time = at_a_time
        self._requests = _Requests()
        self._stacks = WorkerStacks(workers)
        self._timeout = timeout
        self._reads = Reads(reader)
        self._rooms_each = 0 if pin_memory else 2 * ahead + 1  # page-locking copies anyway
        with _hints_silenced():
            self._loader: DataLoader[Any] = DataLoader(
                self._reads,
                batch_size=None,
                sampler=self._requests,
                num_workers=workers,
                collate_fn=_unchanged,
                pin_memory=pin_memory,
                timeout=min(timeout, _LOOK_EVERY),
                worker_init_fn=self._stacks.prepare_worker,
                prefetch_factor=ahead,
                persistent_workers=True,
                multiprocessing_context="fork",  # data sets and transforms need not be picklable
                generator=torch.Generator(),  # without it torch draws from the training process's generator
            )

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each micro-batch, in the order of the requests; workers begin at once.

        ``DataError`` for a sample that cannot be read, ``RankError`` for a worker that was killed,
        ``StallError`` after ``timeout``. A second call ends the iteration of the first one.
        """
        if self._requests.waiting:
            self.close()  # an iteration was left early; its results must not be taken for ours
        self._requests.replace(requests)
        return self._results(self._start(), self._requests.turn)

    def _results(self, iterator: Iterator[Any], turn: int) -> Iterator[Any]:
        while True:
            self._requests.check(turn)
            try:
                result = self._next(iterator)
            except StopIteration:
                return
            except _FAILED as error:
                raise self._explained(error) from error
            self._requests.waiting.popleft()
            if isinstance(result, Failure):
                self.close()
                raise DataError(result.message) from InWorker(result.trace)
            for data in (result if isinstance(result, Together) else self._reads.opened(result)).apart():
                self._requests.check(turn)
                yield data

    @property
    def sound(self) -> bool:
        """Whether no worker that was started has died."""
        return all(worker.is_alive() for worker in getattr(self._loader._iterator, "_workers", ()))

    def close(self) -> None:
        """Ends the workers, also those that are stuck. Reading again starts new ones."""
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        self._requests.replace(iter(()))
        if iterator is not None:
            iterator._shutdown_workers()
        self._reads.close()

    def _start(self) -> Iterator[Any]:
        if self._loader._iterator is not None:
            try:
                return iter(self._loader)
            except _FAILED:  # a worker has died, or does not answer, since the last epoch
                requests = self._requests.requests
                self.close()
                self._requests.replace(requests)
        self._reads.open(self._loader.num_workers, self._rooms_each)
        with _hints_silenced(), signals_held():
            iterator = iter(self._loader)
            unwatch(iterator)
        return iterator

    def _next(self, iterator: Iterator[Any]) -> Any:
        """The next result; looks at the workers while it waits, and gives up after the time limit."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(iterator)
            except RuntimeError as error:
                if "timed out" not in str(error) or time.monotonic() >= deadline:
                    raise

    def _explained(self, error: Exception) -> Exception:
        workers = list(getattr(self._loader._iterator, "_workers", ()))
        reading = _described(self._requests.waiting)
        if "timed out" in str(error):
            found: Exception = StallError(
                f"The data loader gave nothing for {self._timeout:g} s, while it read {reading}. "
                f"If a sample may take so long, raise timeout=.{self._stacks.report(workers)}"
            )
        else:
            found = explain_loss(workers, error, reading)
        for worker in workers:
            worker.terminate()
        self.close()
        return found


class _Requests(Sampler[Request]):
    """Hands out the requests of the latest iteration, and remembers those that are not answered."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.requests: Iterator[Request] = iter(())
        self.turn = 0

    def replace(self, requests: Iterator[Request]) -> None:
        self.requests = requests
        self.turn += 1
        self.waiting.clear()

    def check(self, turn: int) -> None:
        if turn != self.turn:
            raise RuntimeError(
                "This iteration has ended, because the same loader was iterated again or closed."
            )

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.waiting.append(request)
            yield request


def _described(waiting: deque[Request]) -> str:
    if not waiting:
        return "nothing"
    request = waiting[0]
    shown = ", ".join(str(index) for index in request.indices[:8].tolist())
    return f"samples {shown}{', …' if len(request.indices) > 8 else ''} of epoch {request.epoch}"


def _unchanged(data: Any) -> Any:
    return data


@contextmanager
def _hints_silenced() -> Iterator[None]:
    """Hides the general advice of torch and Python about starting processes: these were asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
        )
        yield
