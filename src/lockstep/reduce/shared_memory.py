"""Ordered all-reduce through shared memory: for CPU ranks of one host, at about the cost of the copies.

    slots     | rank 0: node, node | rank 1: node, node | ...      every rank copies its tree nodes in, then signals

    a small bucket, or two ranks:                                  every rank folds all nodes for itself
    result    | shard 0 | shard 1 | ...                            else rank j folds shard j, then signals,
                                                                   and every rank copies the result out

The adds are those of ``OrderedReducer``, one by one, so the bits are equal. No rank waits while backward still runs: a
shard is folded there only if the others are found to be ready. A step waits once for the others' nodes, and once more
only if it has a sharded bucket; each wait costs a turn of the scheduler where ranks outnumber cores. Buckets that every
rank folds have two sets of slots, used in turn: a rank that is ahead may write the next step's nodes while another
still reads this step's.
"""

from __future__ import annotations

import mmap
import time
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.strategy_options import REDUCERS
from lockstep.core.summation_tree import fold
from lockstep.core.world import usable_cores
from lockstep.distributed.shared_memory import CACHE_LINE, Word, share_memory
from lockstep.errors import StallError
from lockstep.reduce.reducer import BucketShape, NodeLayout, Reducer, most_slots, shard_edge
from lockstep.runtime.stack_dump import Mark, stack_marker

_FOLDED_BY_ALL_BYTES = 4 << 20


class SharedMemoryReducer(Reducer):
    """Sums in the order of the gradient tree through memory that all ranks of one host share.

    The process group is used to set up, never in a step. After ``timeout`` seconds a wait for another rank becomes a
    ``StallError`` that names it.
    """

    level = REDUCERS["ordered"]
    turns = 2

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group, self._timeout = group, timeout
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._buckets: list[_SharedBucket] = []
        self._layout = NodeLayout(0, ())
        self._started = self._folded = 0
        self._steps = 0
        self._stay_awake = self._ranks * torch.get_num_threads() <= usable_cores()
        self._before = 0

    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """See ``Reducer.allocate``."""
        words, slots = 3 * self._ranks, most_slots(leaves, self._ranks)
        sizes = [CACHE_LINE] * words + [2 * self._ranks * header * 8]
        sizes += [_SharedBucket.size(shape, self._ranks, slots) for shape in buckets]
        # Each begins on a cache line of its own.
        starts = [0, *accumulate(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)]
        headers, *places, end = starts[words:]
        memory = share_memory(end, self._group)
        view = memoryview(memory)
        counters = [Word(view[place : place + 4]) for place in starts[:words]]
        self._written, self._reduced, self._announced = (counters[i::3] for i in range(3))
        self._headers = torch.frombuffer(
            memory, dtype=torch.float64, count=2 * self._ranks * header, offset=headers
        ).view(2, self._ranks, header)
        self._buckets = [
            _SharedBucket(shape, self._rank, self._ranks, slots, memory, place) for shape, place in zip(buckets, places)
        ]
        self._sharded = [bucket for bucket in self._buckets if bucket.sharded]
        dist.barrier(group=self._group)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``."""
        self._layout = NodeLayout.of(leaves, self._ranks)
        self._before += self._started
        self._started = self._folded = 0
        self.turn = self._steps % 2

    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """See ``Reducer.staging``."""
        return self._buckets[bucket].slots(self.turn if turn is None else turn)[self._rank, slot]

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``."""
        self._started += 1
        self._written[self._rank].advance()
        self.bytes_sent += self._buckets[bucket].bytes_sent(len(self._layout.ranks[self._rank]))
        while self._folded < bucket and all(word.value > self._before + self._folded for word in self._written):
            self._fold_next()

    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        self._steps += 1
        headers = self._headers[self._steps % 2]
        headers[self._rank] = header
        self._announced[self._rank].advance()
        self._announced[self._rank].wake()
        deadline = time.monotonic() + self._timeout
        self._wait(self._announced, deadline)
        while self._folded < self._started:
            self._fold_next()
        if self._sharded:
            self._reduced[self._rank].advance()
            self._reduced[self._rank].wake()
            self._wait(self._reduced, deadline)
            for bucket in self._sharded:
                bucket.copy_out()
        return headers.clone()

    def total(self, bucket: int) -> Tensor:
        """See ``Reducer.total``."""
        return self._buckets[bucket].total

    def renew(self, bucket: int) -> None:
        """See ``Reducer.renew``."""
        self._buckets[bucket].renew()

    def _fold_next(self) -> None:
        self._buckets[self._folded].fold(self._layout, self.turn)
        self._folded += 1

    @stack_marker(Mark.WAITS_FOR_GRADIENTS)
    def _wait(self, words: list[Word], deadline: float) -> None:
        """Waits until every rank's counter has come to the current step."""
        for rank, word in enumerate(words):
            if word.value < self._steps and not word.wait_until(self._steps, deadline, stay_awake=self._stay_awake):
                missing = [other for other, counter in enumerate(words) if counter.value < self._steps]
                raise StallError(
                    f"Rank {self._rank} timed out after {self._timeout:.0f} s waiting for the gradients of rank "
                    f"{rank}. Missing ranks: {missing}. They hang, or left the loop early."
                )


class _SharedBucket:
    """The shared memory of one bucket: slots[turn, rank, node, numel], then result[numel] where it is sharded."""

    def __init__(self, shape: BucketShape, rank: int, ranks: int, slots: int, memory: mmap.mmap, place: int) -> None:
        self.sharded = _is_sharded(shape, ranks)
        turns = 1 if self.sharded else 2
        held = turns * ranks * slots * shape.numel
        everything = _map(memory, shape.dtype, held + self.sharded * shape.numel, place)
        self._slots = everything[:held].view(turns, ranks, slots, shape.numel)
        self.total = torch.empty(shape.numel, dtype=shape.dtype)
        self._result = everything[held:] if self.sharded else self.total
        self._shard = slice(0, shape.numel)
        if self.sharded:
            self._shard = slice(*(shard_edge(shape.numel, ranks, edge) for edge in (rank, rank + 1)))

    @staticmethod
    def size(shape: BucketShape, ranks: int, slots: int) -> int:
        copies = ranks * slots + 1 if _is_sharded(shape, ranks) else 2 * ranks * slots
        return copies * shape.numel * shape.dtype.itemsize

    def slots(self, turn: int) -> Tensor:
        return self._slots[turn % self._slots.shape[0]]

    def bytes_sent(self, nodes: int) -> int:
        result = self._shard.stop - self._shard.start if self.sharded else 0
        return (nodes * self.total.numel() + result) * self.total.element_size()

    def fold(self, layout: NodeLayout, turn: int) -> None:
        """Folds this rank's shard of all nodes into the result. The slots themselves are only read."""
        if self._shard.start == self._shard.stop:
            return
        slots, target = self.slots(turn), self._result[self._shard]
        nodes = [
            (node, slots[rank, slot, self._shard])
            for rank, nodes in enumerate(layout.ranks)
            for slot, node in enumerate(nodes)
        ]
        if len(nodes) == 2:
            torch.add(nodes[0][1], nodes[1][1], out=target)
        else:
            target.copy_(fold(nodes, layout.leaves, torch.add))

    def renew(self) -> None:
        """Gives other memory to ``total``."""
        self.total = torch.empty_like(self.total)
        if not self.sharded:
            self._result = self.total

    def copy_out(self) -> None:
        self.total.copy_(self._result)


def _map(memory: mmap.mmap, dtype: torch.dtype, count: int, place: int) -> Tensor:
    """A flat tensor over shared memory; a parameter of size zero may need one of no elements, which torch refuses."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place)


def _is_sharded(shape: BucketShape, ranks: int) -> bool:
    """Returns whether folding is shared out: not where it costs less than waiting for the others' shards."""
    return ranks > 2 and ranks * shape.numel * shape.dtype.itemsize > _FOLDED_BY_ALL_BYTES
