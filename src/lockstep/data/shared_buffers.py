"""Memory that a rank shares with its workers, in buffers that are reused.

New shared memory costs more than filling it: the kernel zeroes each page for the worker, maps it again for the rank,
and frees it after the step. A buffer stays mapped, and its pages stay where they are:

    worker   acquires a free buffer of its own | writes a request's tensors into it | sends their offsets
    rank                                                          | tensors in the buffer | released: buffer is free

A buffer is marked as taken in a byte that both see: the worker sets it, the rank clears it when the last tensor in the
buffer is released, whoever held it. Where no buffer is free, or one is too small, tensors are sent as torch sends them;
no value depends on it.

For GPUs the rank page-locks a buffer when it first comes, so that copies run beside the process, out of the memory that
the worker has written. It is free when the GPUs have passed the point at which the last tensor was released. torch's
loader copies each batch into page-locked memory, in a thread that holds Python up while it maps and unmaps the pages.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lockstep.core.fingerprint import memory_of, octets
from lockstep.data.batch import map_leaves
from lockstep.data.reader import ALIGNMENT, GroupedBatch, is_dense
from lockstep.runtime.devices import page_lock, page_unlock, passing, wait_for

logger = logging.getLogger(__name__)

_SIZES = 1 << 30, 256 << 20
"""Bytes of a buffer, and the same if the process may not map that many. Unwritten pages take no memory."""
_SMALL = 16 << 10
"""The size in bytes up to which tensors are sent by value, so that labels that somebody collects occupy no buffer."""
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap does not name

Bytes = npt.NDArray[np.uint8]
_Leaving = deque[tuple[Callable[[], bool], int]]
"""Buffers without tensors, from which GPUs may still copy; the function tells whether they have passed that."""
_kept: list[tuple[_Leaving, Bytes]] = []
"""Memory that was closed before GPUs had passed it."""


@dataclass(frozen=True)
class _Sent:
    """A tensor as it is sent: its offset in the buffer, or its bytes."""

    place: int | bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WorkerResult:
    """The result of one request as it is sent: tensors are replaced by their offsets."""

    buffer: int
    used: int
    """Bytes of it."""
    found: GroupedBatch


class SharedBuffers:
    """Some buffers for each worker. Made before the workers are forked.

    Args:
        workers: how many there are.
        each: buffers of a worker: for what it has read ahead, and as much again that the rank still holds.
        gpus: to which the rank copies what is in them.

    Raises:
        OSError: the process may not map that much memory.
    """

    def __init__(self, workers: int, each: int, gpus: Sequence[torch.device] = ()) -> None:
        self._each, self._rank, self._turn = each, os.getpid(), 0
        self._gpus, self._may_lock = tuple(gpus), True
        self._locked: dict[int, int] = {}
        """By the address of a buffer: how many bytes of it are page-locked."""
        self._leaving: _Leaving = deque()
        self._memory, self._size = _reserve(workers * each)
        self._whole: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        if gpus:
            end = partial(_unlock, self._locked, self._leaving)
            weakref.finalize(self._whole, end, self._gpus, self._rank).atexit = False
            _kept[:] = [each for each in _kept if not _all_passed(each[0])]
        self._taken: Bytes = np.frombuffer(mmap.mmap(-1, workers * each), dtype=np.uint8)
        self._held: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        """In the rank: the buffers that have tensors."""
        self._kept: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        """In a worker: those that are being filled, and any whose tensors a data set keeps."""

    def buffer(self, worker: int) -> SharedBuffer | None:
        """In a worker: one of its buffers that nobody uses, neither the rank nor anything that was kept here.

        It takes them in turn, so that all have their pages after the first few steps: a run that does not fit into
        memory ends there, and not hours later when for once the rank was slower than its workers.
        """
        for turn in range(self._turn, self._turn + self._each):
            number = worker * self._each + turn % self._each
            if not self._taken[number] and number not in self._kept:
                content = self._kept[number] = self._bytes(number)
                self._turn = turn + 1
                return SharedBuffer(number, content, self._taken)
        return None

    def open(self, answer: WorkerResult) -> GroupedBatch:
        """In the rank: what was read. The buffer is free again when the last of the tensors in it has gone."""
        content = self._held[answer.buffer] = self._bytes(answer.buffer)
        end = partial(_leave, self._leaving, self._gpus) if self._gpus else partial(_free, self._taken)
        weakref.finalize(content, end, answer.buffer, self._rank).atexit = False
        receive = _once(lambda sent: _received(sent, content))
        found = answer.found.map(lambda data: _changed(data, _Sent, receive))
        if not self._gpus:
            return found
        self._lock(content.ctypes.data, answer.used)
        return found.pin_memory()  # copies what is not in the buffer, or if it could not be page-locked

    def free(self) -> None:
        """In the rank: frees the buffers whose copies the GPUs have passed."""
        for _ in range(len(self._leaving)):
            has_passed, number = self._leaving.popleft()
            if has_passed():
                _clear(self._taken, number)
            else:
                self._leaving.append((has_passed, number))

    def close(self) -> None:
        """Gives the memory of buffers without tensors back, also where another process still has it mapped."""
        if os.getpid() != self._rank:
            return
        self.free()
        if self._leaving:  # a GPU that is stuck would be waited for in vain
            _kept.append((self._leaving, self._whole))
        leaving = {number for _, number in self._leaving}
        for number in range(len(self._taken)):
            if number not in self._held and number not in leaving:
                address = self._bytes(number).ctypes.data
                if self._locked.pop(address, 0):
                    page_unlock(address)
                self._memory.madvise(mmap.MADV_REMOVE, number * self._size, self._size)

    def _lock(self, address: int, used: int) -> None:
        """Page-locks the used bytes of a buffer, and some more: the next batch may be a little larger."""
        if not self._may_lock or used <= self._locked.get(address, 0):
            return
        if self._locked.pop(address, 0):
            page_unlock(address)
        step = max(1 << 20, 1 << max(0, used.bit_length() - 3))
        size = min(self._size, -(-used // step) * step)
        self._may_lock = page_lock(address, size, self._gpus[0])
        if self._may_lock:
            self._locked[address] = size
        else:
            logger.warning(
                "CUDA cannot page-lock the memory in which workers of the loader deliver batches, so each batch is "
                "copied once more. The bits are the same."
            )

    def _bytes(self, number: int) -> Bytes:
        """All of a buffer; tensors in it keep this array, and so tell whether there are any."""
        return np.frombuffer(self._whole.data, dtype=np.uint8, count=self._size, offset=number * self._size)


class SharedBuffer:
    """A buffer in which a worker puts the tensors of one request; ``taken`` are the marks of all buffers."""

    def __init__(self, number: int, content: Bytes, taken: Bytes) -> None:
        self._number, self._content, self._taken = number, content, taken
        self._used = 0

    def empty(self, *shape: int) -> Tensor | None:
        """A ``uint8`` tensor here that is to be filled; None where it does not fit."""
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = begin + int(np.prod(shape, dtype=np.int64))
        if end > len(self._content):
            return None
        self._used = end
        return torch.from_numpy(self._content[begin:end]).view(shape)

    def answer(self, found: GroupedBatch) -> WorkerResult:
        """The result to send; tensors that are not in the buffer yet are copied into it."""
        self._taken[self._number] = 1
        sent = found.map(lambda data: _changed(data, Tensor, _once(self._sent)))
        return WorkerResult(self._number, self._used, sent)

    def _sent(self, tensor: Tensor) -> Tensor | _Sent:
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
            return tensor
        if not is_dense(tensor) or not tensor.is_contiguous() or not tensor.numel():
            return tensor
        shape, size = tuple(tensor.shape), tensor.nbytes
        if size <= _SMALL:
            return _Sent(bytes(memory_of(tensor)), tensor.dtype, shape)
        offset = tensor.data_ptr() - self._content.ctypes.data
        if not 0 <= offset < len(self._content):
            place = self.empty(size)
            if place is None:
                return tensor
            place.copy_(octets(tensor))
            offset = place.data_ptr() - self._content.ctypes.data
        return _Sent(offset, tensor.dtype, shape)


def _reserve(buffers: int) -> tuple[mmap.mmap, int]:
    """Memory for a number of buffers, and the bytes of each."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
    with suppress(OSError):
        return mmap.mmap(-1, buffers * _SIZES[0], flags=flags), _SIZES[0]
    return mmap.mmap(-1, buffers * _SIZES[1], flags=flags), _SIZES[1]


def image_buffer(count: int, size: int) -> Tensor:
    """Memory for ``uint8`` pictures (count, 3, size, size); in a worker the rank has it too, and needs no copy."""
    shape = (count, 3, size, size)
    worker = get_worker_info()
    if worker is None:
        return torch.empty(shape, dtype=torch.uint8)
    # a worker of the user's own DataLoader has no buffer
    buffer: SharedBuffer | None = getattr(worker.dataset, "buffer", None)
    pictures = None if buffer is None else buffer.empty(*shape)
    if pictures is not None:
        return pictures
    storage = torch.UntypedStorage._new_shared(count * 3 * size * size)  # type: ignore[no-untyped-call]  # torch
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def _leave(leaving: _Leaving, gpus: Sequence[torch.device], buffer: int, rank: int) -> None:
    """Notes that a buffer has no tensors any more."""
    if os.getpid() == rank:
        with suppress(RuntimeError):  # of a GPU that has failed
            leaving.append((passing(gpus), buffer))


def _all_passed(leaving: _Leaving) -> bool:
    return all(has_passed() for has_passed, _ in leaving)


def _unlock(locked: dict[int, int], leaving: _Leaving, gpus: Sequence[torch.device], rank: int) -> None:
    """Unregisters page-locked memory before it is unmapped: CUDA would keep using pages that belong to nobody."""
    if os.getpid() != rank or not locked:
        return
    with suppress(RuntimeError):
        for gpu in () if _all_passed(leaving) else gpus:
            wait_for(gpu)
        for address in locked:
            page_unlock(address)


def _free(taken: Bytes, buffer: int, rank: int) -> None:
    """Clears the mark of a buffer, in the rank: a process that was forked meanwhile releases copies only."""
    if os.getpid() == rank:
        _clear(taken, buffer)


def _clear(taken: Bytes, buffer: int) -> None:
    """Clears a mark after all that this process has read in the buffer.

    An Arm CPU may show a store to others before loads that come earlier. A lock that is released and taken again keeps
    them in order; it is one of this call, which may interrupt itself as a finalizer.
    """
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        taken[buffer] = 0


def _received(sent: _Sent, content: Bytes) -> Tensor:
    if isinstance(sent.place, bytes):
        return torch.frombuffer(bytearray(sent.place), dtype=sent.dtype).view(sent.shape).clone()  # aligned
    size = int(np.prod(sent.shape, dtype=np.int64)) * sent.dtype.itemsize
    return torch.from_numpy(content[sent.place : sent.place + size]).view(sent.dtype).view(sent.shape)


def _once(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, once for each object: a tensor that is there twice is one tensor also when it has arrived."""
    known: dict[int, tuple[Any, Any]] = {}

    def changed(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, change(value)
        return known[id(value)][1]

    return changed


def _changed(data: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with every value of a kind changed."""
    return map_leaves(data, lambda value: change(value) if isinstance(value, kind) else value)
