"""Reads micro-batches in worker processes, ahead of the training process, or in that process where that is cheaper.

torch's ``DataLoader`` moves the requests and the tensors; this module decides what to read, a micro-batch per request,
so the number of workers changes who reads and never what. Workers stay over the epochs, leave Ctrl-C and a cluster's
SIGTERM to the rank (which finishes its step and saves), and end with the rank however it ends.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.core.values import short_digest
from lockstep.data.reader import Collate, InlineReading, ReadTrace, Request, SampleReader
from lockstep.data.rereading import content_of, restorer_of
from lockstep.data.worker_process import Failure, InWorker, WorkerDataset, WorkerStacks, explain_lost_worker, unwatch
from lockstep.errors import ConfigError, DataError, StallError
from lockstep.runtime.stack_dump import Mark, stack_marker
from lockstep.runtime.stop_signals import stop_signals_held
from lockstep.runtime.torch_internals import LOADER_TIMED_OUT, MANY_WORKERS
from lockstep.text import shorten

_LOOK_EVERY = 1.0
"""Seconds between two checks of the workers; a dead one is found within this time."""

_FAILED = (RuntimeError, OSError, EOFError)
"""The errors that torch raises when a worker has died, or did not answer in time."""


class WorkerReading:
    """Worker processes that read the micro-batches of one data set.

    Args:
        reader: reads one micro-batch; used in the workers only.
        workers: number of processes, at least 1; see ``ReadingOptions`` for it and for the rest.
        prefetch: requests each worker may be ahead of what was asked for.
        at_a_time: how many micro-batches of a step one request should ask for.
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        workers: int,
        prefetch: int = 2,
        at_a_time: int = 1,
        gpus: Sequence[torch.device] = (),
        timeout: float = 120.0,
    ) -> None:
        self.at_a_time = at_a_time
        """Micro-batches per request."""
        self._requests = _Requests()
        self._stacks = WorkerStacks(workers)
        self._timeout = timeout
        self._reads = WorkerDataset(reader)
        self._buffers_each, self._gpus = 2 * prefetch + 1, gpus
        with _hints_silenced():
            self._loader: DataLoader[Any] = DataLoader(
                self._reads,
                batch_size=None,
                sampler=self._requests,
                num_workers=workers,
                collate_fn=lambda data: data,
                pin_memory=bool(gpus),  # of what is not in a shared buffer
                timeout=min(timeout, _LOOK_EVERY),
                worker_init_fn=self._stacks.prepare_worker,
                prefetch_factor=prefetch,
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
        return self._results(self._start(), self._requests.iteration_id)

    def _results(self, iterator: Iterator[Any], iteration_id: int) -> Iterator[Any]:
        while True:
            self._requests.check(iteration_id)
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
            for data in self._reads.opened(result).apart():
                self._requests.check(iteration_id)
                yield data

    @property
    def sound(self) -> bool:
        """True while every worker that was started is alive."""
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
        self._reads.open(self._loader.num_workers, self._buffers_each, self._gpus)
        with _hints_silenced(), stop_signals_held():  # until each worker has set its own handlers
            iterator = iter(self._loader)
            unwatch(iterator)
        return iterator

    @stack_marker(Mark.WAITS_FOR_WORKER)
    def _next(self, iterator: Iterator[Any]) -> Any:
        """The next result; looks at the workers while it waits, and gives up after the time limit."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(iterator)
            except RuntimeError as error:
                if not LOADER_TIMED_OUT.is_in(str(error)) or time.monotonic() >= deadline:
                    raise

    def _explained(self, error: Exception) -> Exception:
        workers = list(getattr(self._loader._iterator, "_workers", ()))
        waiting, reading = self._requests.waiting, "nothing"
        if waiting:
            reading = f"samples {shorten(waiting[0].indices.tolist(), 8)} of epoch {waiting[0].epoch + 1}"
        if LOADER_TIMED_OUT.is_in(str(error)):
            found: Exception = StallError(
                f"The data loader returned nothing for {self._timeout:g} s while it read {reading}. "
                f"If a sample may take so long, raise timeout=.{self._stacks.report(workers)}"
            )
        else:
            found = explain_lost_worker(workers, error, reading)
        for worker in workers:
            worker.terminate()
        self.close()
        return found


class _Requests(Sampler[Request]):
    """Hands out the requests of the latest iteration, and remembers those that are not answered."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.requests: Iterator[Request] = iter(())
        self.iteration_id = 0

    def replace(self, requests: Iterator[Request]) -> None:
        self.requests = requests
        self.iteration_id += 1
        self.waiting.clear()

    def check(self, iteration_id: int) -> None:
        if iteration_id != self.iteration_id:
            raise RuntimeError("This iteration has ended, because the same loader was iterated again or closed.")

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.waiting.append(request)
            yield request


@contextmanager
def _hints_silenced() -> Iterator[None]:
    """Hides general advice of torch and Python about starting processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=MANY_WORKERS.texts[0])
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield


Reading = InlineReading | WorkerReading

_READ_AT_ONCE = 1 << 19
"""Bytes of small steps that are taken from memory at once; what is read fits into a core's cache."""


class ReadingOptions(TypedDict, total=False):
    """Who reads a data set, and how."""

    seed: int
    """The run's seed (0); with epoch and index it decides every random draw of a sample."""
    workers: int
    """Processes that read ahead; 0, the default, reads when asked. A data set in memory is never read by workers."""
    collate: Collate | None
    """Makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``."""
    gpus: Sequence[torch.device]
    """Those that tensors are copied to: they are delivered in page-locked memory. Empty for a CPU, the default."""
    timeout: float
    """Seconds (120) to wait for one answer of a worker: a micro-batch, or its part of a step that is read together."""
    trace: ReadTrace | None
    """Notes when each micro-batch is read."""
    checks: bool
    """Reads samples of the first micro-batch twice, to see that they are equal (False)."""


def open_reading(
    dataset: Any, *, prefetch: int = 2, per_step: int = 1, rows: int = 1, **options: Unpack[ReadingOptions]
) -> Reading:
    """The way to read a data set: in worker processes if there are any and the set is not in memory, else here.

    Args:
        dataset: any map-style data set.
        prefetch: micro-batches that may be read ahead by all workers together; each is kept busy with two at least.
        per_step: micro-batches of a step that this process reads; a request asks for several of them.
        rows: samples of a micro-batch.
        options: see ``ReadingOptions``.
    """
    seed, collate, trace = options.get("seed", 0), options.get("collate"), options.get("trace")
    workers, gpus = options.get("workers", 0), options.get("gpus", ())
    if workers < 0:
        raise ConfigError(f"workers={workers} must be 0 (read in the training process) or more.")
    checks = options.get("checks", False)
    reader = SampleReader(dataset, seed=seed, collate=collate, trace=trace, checks=checks)
    if workers == 0 or reader.in_memory:
        return InlineReading(reader, per_step=per_step, steps=_steps(reader, per_step * rows), pin_memory=bool(gpus))
    # Each worker answers once a step
    at_a_time = -(-per_step // workers) if reader.rows_independent else 1
    return WorkerReading(
        reader,
        workers=workers,
        prefetch=max(2, -(-prefetch // (workers * at_a_time))),
        at_a_time=at_a_time,
        gpus=gpus,
        timeout=options.get("timeout", 120.0),
    )


UNREADABLE = short_digest(repr(["cannot be read"]).encode())
"""The digest of a sample that cannot be read."""


def sample_digests(dataset: Any, indices: Sequence[int], **options: Unpack[ReadingOptions]) -> dict[str, str]:
    """Digests of some samples as they are read for training, by the name of each in messages.

    They are read where training reads them: in a worker process if there are any, so that files which a set keeps open
    are not opened here.
    """
    put_back, is_refused = restorer_of({"": dataset, "collate": options.get("collate")}), False
    options["workers"] = min(1, options.get("workers", 0))
    options["checks"], options["trace"] = True, None
    reading, found = open_reading(dataset, **options), {}
    for index in indices:
        try:
            content = content_of(next(reading.read(iter([Request(0, np.array([index]))]))))
        except DataError:  # the step that holds it raises this too, or skips the sample
            content, is_refused = ["cannot be read"], True
        found[f"sample {index}"] = short_digest(repr(content).encode())
    reading.close()
    if is_refused:
        put_back()  # it is to be refused again, though it has made something of these samples
    return found


def _steps(reader: SampleReader, rows: int) -> int:
    """The number of steps to read at once: more than one where the set is in memory and steps are small."""
    return max(1, _READ_AT_ONCE // (reader.row_bytes * rows)) if reader.row_bytes else 1
