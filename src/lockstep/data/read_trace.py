"""Records when each process of a loader reads, in memory that the rank shares with its workers.

Workers are forked and send micro-batches only; a record written here reaches the training process without a message,
also from a worker that is in the middle of reading or was killed. The newest records of each process are kept.

    process | count | began, ended, epoch, first sample, samples | ... | of the next process
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from lockstep.core.plan import Indices

_KEPT = 1024
_COUNT = struct.Struct("<q")
_NOTE = struct.Struct("<qqqqq")
_SIZE = _COUNT.size + _KEPT * _NOTE.size


@dataclass(frozen=True)
class ReadSpan:
    """One micro-batch that was read."""

    worker: int
    """Number of the worker; -1 for the training process."""
    began: int
    """``time.perf_counter_ns()``, a clock that all processes of a machine share."""
    ended: int
    epoch: int
    """Of the samples' keys; -1 where they are evaluated."""
    first: int
    """Index of the first sample."""
    samples: int


class ReadTrace:
    """The notes of all processes that read one data set.

    Args:
        name: what is read, for people.
        workers: how many processes beside this one may read.
    """

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self._processes = workers + 1
        self._memory = mmap.mmap(-1, self._processes * _SIZE)

    @contextmanager
    def noting(self, epoch: int, indices: Indices) -> Iterator[None]:
        """Notes that the samples are read inside, in whichever process that is."""
        began = time.perf_counter_ns()
        yield
        self._note(began, time.perf_counter_ns(), epoch, int(indices[0]), len(indices))

    def spans(self) -> list[ReadSpan]:
        """The micro-batches that were read, worker by worker; the last 1,024 of each."""
        found = []
        for process in range(self._processes):
            (count,) = _COUNT.unpack_from(self._memory, process * _SIZE)
            for number in range(max(0, count - _KEPT), count):
                note = _NOTE.unpack_from(self._memory, _place(process, number))
                found.append(ReadSpan(process - 1, *note))
        return found

    def _note(self, *note: int) -> None:
        info = get_worker_info()
        process = 0 if info is None else info.id + 1
        (count,) = _COUNT.unpack_from(self._memory, process * _SIZE)
        _NOTE.pack_into(self._memory, _place(process, count), *note)
        _COUNT.pack_into(self._memory, process * _SIZE, count + 1)


def _place(process: int, number: int) -> int:
    return process * _SIZE + _COUNT.size + number % _KEPT * _NOTE.size
