"""Records when each process of a loader reads, in memory that the rank shares with its workers.

Workers are forked and send micro-batches only; a record written here reaches the training process without a message,
also from a worker that is in the middle of reading or was killed. The newest records of each process are kept.

    process | 0, 0, 0, 0, count | began, ended, epoch, first sample, samples | ... | of the next process
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch.utils.data import get_worker_info

from lockstep.core.plan import Indices

_KEPT = 1024
_FIELDS = 5


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
    """The notes of all processes that read one data set: this one and some workers. ``name`` is for people."""

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        shape = (workers + 1, 1 + _KEPT, _FIELDS)
        memory = mmap.mmap(-1, math.prod(shape) * 8)
        self._notes = np.frombuffer(memory, dtype=np.int64).reshape(shape)

    @contextmanager
    def noting(self, epoch: int, indices: Indices) -> Iterator[None]:
        """Notes that the samples are read inside, in whichever process that is."""
        began = time.perf_counter_ns()
        yield
        info = get_worker_info()
        notes = self._notes[0 if info is None else info.id + 1]
        count = int(notes[0, -1])
        notes[1 + count % _KEPT] = began, time.perf_counter_ns(), epoch, indices[0], len(indices)
        notes[0, -1] = count + 1

    def spans(self) -> list[ReadSpan]:
        """The micro-batches that were read, worker by worker; the last 1,024 of each."""
        found = []
        for worker, (head, *notes) in enumerate(self._notes.tolist(), start=-1):
            count = head[-1]
            found += [ReadSpan(worker, *notes[n % _KEPT]) for n in range(max(0, count - _KEPT), count)]
        return found
