"""Exchanges of bytes between all ranks: by collectives of a process group, or through memory that they share.

    two sets of slots, in turn   | rank 0: a piece | rank 1: a piece | ...     every rank writes, signals, and reads

Through memory, a rank waits once for each piece. It may write into a set again because all ranks have signalled the
other one since, which each does after it has read this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.world import usable_cores
from lockstep.distributed.collectives import all_gather_flat, drop_process_groups
from lockstep.distributed.shared_memory import CACHE_LINE, Word, can_share_memory, share_memory
from lockstep.errors import RankError, StallError
from lockstep.runtime.stack_dump import Mark, stack_marker

_PIECE_BYTES = 1 << 20
"""The bytes that a rank gives at once, a multiple of the size of every number type."""


Counts = Sequence[Sequence[int]]


class RankExchange(Protocol):
    """Exchanges tensors of any number type, of one shape and type on all ranks. All methods are collective."""

    ranks: int
    rank: int
    """This one, of them."""
    copies: int
    """How often a rank gives its row to others in ``all_gather``."""

    def all_gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks, shape (ranks, n), from one of shape (n,)."""

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Sends row r to rank r, and returns the rows that the ranks sent to this one; both of shape (ranks, n)."""

    def gather_parts(self, own: Sequence[Tensor], places: Sequence[Sequence[Tensor]], counts: Counts) -> None:
        """Writes what each rank has into ``places[rank]``, without a copy of all of it in between.

        Args:
            own: of this rank, flat tensors of one number type.
            places: flat tensors for those of each rank, by rank; none at all where this one only gives.
            counts: their lengths, by rank.
        """

    def exchange_parts(self, parts: Sequence[Sequence[Tensor]], counts: Counts) -> Tensor:
        """Sends parts to each rank; returns those for this rank, joined: shape (ranks, sum of this rank's lengths).

        Args:
            parts: what this rank has for each, flat tensors of one number type.
            counts: their lengths, by the rank that gets them.
        """

    def release(self) -> None:
        """Releases the process group, or the memory."""


class GroupExchange:
    """Exchanges by collectives, on the bytes of tensors: no backend has to know their number type."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.copies = self.ranks - 1

    def all_gather(self, row: Tensor) -> Tensor:
        """See ``RankExchange.all_gather``."""
        rows = row.new_empty(self.ranks, row.numel())
        all_gather_flat(_bytes(rows).view(-1), _bytes(row.contiguous()), self._group)
        return rows

    @stack_marker(Mark.WAITS_FOR_EXCHANGE)
    def all_to_all(self, rows: Tensor) -> Tensor:
        """See ``RankExchange.all_to_all``."""
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(_bytes(received), _bytes(rows.contiguous()), group=self._group)
        return received

    def gather_parts(self, own: Sequence[Tensor], places: Sequence[Sequence[Tensor]], counts: Counts) -> None:
        """See ``RankExchange.gather_parts``."""
        mine = own[0].new_zeros(max(map(sum, counts)))
        _copy(_cut(mine, counts[self.rank]), own)
        for row, tensors, lengths in zip(self.all_gather(mine), places, counts):
            _copy(tensors, _cut(row, lengths))

    def exchange_parts(self, parts: Sequence[Sequence[Tensor]], counts: Counts) -> Tensor:
        """See ``RankExchange.exchange_parts``."""
        mine = parts[0][0].new_zeros(self.ranks, max(map(sum, counts)))
        for row, tensors, lengths in zip(mine, parts, counts):
            _copy(_cut(row, lengths), tensors)
        return self.all_to_all(mine)[:, : sum(counts[self.rank])]

    def release(self) -> None:
        """See ``RankExchange.release``."""
        drop_process_groups(self)


class SharedMemoryExchange:
    """Exchanges through memory of CPU ranks of one host. The group is used to set up only. Collective.

    A rank that waits longer than ``timeout`` seconds raises ``StallError`` with the missing ranks.
    """

    copies = 1

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.ranks, self.rank, self._timeout = dist.get_world_size(group), dist.get_rank(group), timeout
        self._stay_awake = self.ranks * torch.get_num_threads() <= usable_cores()
        counters, sizes = self.ranks * CACHE_LINE, 2 * self.ranks
        memory = share_memory(counters + 8 * sizes + sizes * _PIECE_BYTES, group)
        view = memoryview(memory)
        self._written = [Word(view[place : place + 4]) for place in range(0, counters, CACHE_LINE)]
        numbers = torch.frombuffer(memory, dtype=torch.int64, count=sizes, offset=counters)
        self._sizes = numbers.view(2, self.ranks)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=counters + 8 * sizes)
        self._slots = slots.view(2, self.ranks, _PIECE_BYTES)
        self._count = 0

    def all_gather(self, row: Tensor) -> Tensor:
        """See ``RankExchange.all_gather``."""
        if 0 < row.nbytes <= _PIECE_BYTES:
            self._own_slot()[: row.nbytes].view(row.dtype).copy_(row)
            return self._all_slots(row.nbytes)[:, : row.nbytes].view(row.dtype).clone()
        rows = row.new_empty(self.ranks, row.numel())
        self.gather_parts([row.contiguous()], [[each] for each in rows], [[row.numel()]] * self.ranks)
        return rows

    def all_to_all(self, rows: Tensor) -> Tensor:
        """See ``RankExchange.all_to_all``."""
        return self.exchange_parts([[each] for each in rows.contiguous()], [[rows.shape[1]]] * self.ranks)

    def gather_parts(self, own: Sequence[Tensor], places: Sequence[Sequence[Tensor]], counts: Counts) -> None:
        """See ``RankExchange.gather_parts``."""
        numbers, dtype, size = max(map(sum, counts)), own[0].dtype, own[0].element_size()
        for piece in _pieces(numbers, _PIECE_BYTES // size):
            _copy(*_overlap(self._own_slot().view(dtype), own, counts[self.rank], piece))
            slots = self._all_slots(numbers * size).view(dtype)
            for slot, row, lengths in zip(slots, places, counts):
                in_slot, in_parts = _overlap(slot, row, lengths, piece)
                _copy(in_parts, in_slot)

    def exchange_parts(self, parts: Sequence[Sequence[Tensor]], counts: Counts) -> Tensor:
        """See ``RankExchange.exchange_parts``."""
        numbers, dtype, size = max(map(sum, counts)), parts[0][0].dtype, parts[0][0].element_size()
        received = parts[0][0].new_empty(self.ranks, sum(counts[self.rank]))
        most = _PIECE_BYTES // self.ranks // 16 * 16 // size
        for piece in _pieces(numbers, most):
            own = self._own_slot().view(dtype)
            for rank, (row, lengths) in enumerate(zip(parts, counts)):
                _copy(*_overlap(own[rank * most :], row, lengths, piece))
            here = received[:, piece]
            slots = self._all_slots(-self.ranks * numbers * size).view(dtype)
            here.copy_(slots[:, self.rank * most : self.rank * most + here.shape[1]])
        return received

    def release(self) -> None:
        """See ``RankExchange.release``. The memory goes with the object."""

    def _own_slot(self) -> Tensor:
        """Where this rank writes what ``_all_slots`` gives to all."""
        return self._slots[(self._count + 1) % 2, self.rank]

    @stack_marker(Mark.WAITS_FOR_EXCHANGE)
    def _all_slots(self, size: int) -> Tensor:
        """Waits until all ranks have written, and gives what they wrote, shape (ranks, bytes), until the next call.

        ``size`` is that of the whole exchange, and another sign for another kind of it; ``RankError`` if the ranks
        differ in it.
        """
        self._count += 1
        sizes = self._sizes[self._count % 2]
        sizes[self.rank] = size
        own = self._written[self.rank]
        own.advance()
        own.wake()
        deadline = time.monotonic() + self._timeout
        for rank, word in enumerate(self._written):
            if not word.wait_until(self._count, deadline, stay_awake=self._stay_awake):
                missing = [other for other, each in enumerate(self._written) if each.is_behind(self._count)]
                raise StallError(
                    f"Rank {self.rank} timed out after {self._timeout:.0f} s waiting for what rank {rank} holds. "
                    f"Missing ranks: {missing}. They hang, or left the loop early."
                )
        if len(set(sizes.tolist())) > 1:
            raise RankError(
                f"Ranks exchange different amounts of data (bytes by rank: {[abs(each) for each in sizes.tolist()]}): "
                "they do not run the same layers in the same order. Look for code under a rank condition, and for "
                "state or random numbers that differ between ranks."
            )
        return self._slots[self._count % 2]


def open_exchange(
    group: dist.ProcessGroup, device: torch.device, timeout: float, shared: bool
) -> GroupExchange | SharedMemoryExchange:
    """The exchange between the ranks of ``group``: through memory where they can share it. Collective.

    Args:
        timeout: seconds a rank waits for another in shared memory.
        shared: whether shared memory may be used.
    """
    if shared and can_share_memory(group, device):
        return SharedMemoryExchange(group, timeout)
    return GroupExchange(group)


def _bytes(values: Tensor) -> Tensor:
    """The same memory as bytes."""
    return values.view(torch.uint8) if values.numel() else values.new_empty(values.shape, dtype=torch.uint8)


def _cut(row: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The beginning of a row in parts of these lengths; views."""
    return row[: sum(lengths)].split_with_sizes(list(lengths))


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if places:
        torch._foreach_copy_(list(places), list(values))


def _overlap(
    slot: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], piece: slice
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Views of a slot that has a piece of all parts, one after another, and of the parts where they are in it."""
    if piece.start == 0 and sum(lengths) <= piece.stop:
        return _cut(slot, lengths), parts
    in_slot, in_parts, at = [], [], 0
    for part, length in zip(parts, lengths):
        begin, end = max(at, piece.start), min(at + length, piece.stop)
        if begin < end:
            in_slot.append(slot[begin - piece.start : end - piece.start])
            in_parts.append(part[begin - at : end - at])
        at += length
    return in_slot, in_parts


def _pieces(count: int, most: int) -> Iterator[slice]:
    """Cuts ``count`` numbers into pieces of at most ``most``."""
    for begin in range(0, count, most):
        yield slice(begin, min(begin + most, count))
