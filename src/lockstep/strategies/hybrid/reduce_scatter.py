"""Sums gradients over ranks in the tree's order and leaves each rank its rows of every sum.

    [1] all_to_all: every rank sends, of each of its nodes, rows to the rank that holds them
    [2] each rank folds the nodes of its rows along the tree

[1] of a bucket is issued as soon as the bucket is complete, while backward still runs. The memory of the nodes is given
back after each step, so that between steps a rank has its rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import all_gather_flat
from lockstep.levels import Level
from lockstep.reduce import BucketShape, Holding, Reducer
from lockstep.reduce.contract import most_slots
from lockstep.reduce.ordered import OrderedBucket
from lockstep.strategies.rows import rows_of
from lockstep.tree import fold


class OrderedRowReducer(Reducer):
    """Gives each rank its rows of the sums; buckets that hold no gradients are summed for all.

    Args:
        group: the ranks that share rows out.
        device: where the buckets are.
    """

    level = Level.BITWISE

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._buckets: list[_RowBucket | OrderedBucket] = []
        self._holding = Holding(0, ())
        self._started = 0

    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """See ``Reducer.allocate``."""
        slots = most_slots(leaves, self._ranks)
        self._buckets = [self._make_bucket(shape, slots) for shape in buckets]
        self._headers = torch.zeros(self._ranks, header, dtype=torch.float64, device=self._device)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``."""
        self._holding, self._started = Holding.of(leaves, self._ranks), 0
        for bucket in self._buckets:
            if isinstance(bucket, _RowBucket):
                bucket.take_memory()

    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """See ``Reducer.staging``."""
        return self._buckets[bucket].staging(slot)

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``."""
        self._buckets[bucket].send(self._holding, self._rank, self._group)
        self.bytes_sent += self._buckets[bucket].bytes_sent(len(self._holding.ranks[self._rank]))
        self._started += 1

    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        for bucket in self._buckets[: self._started]:
            bucket.fold_and_gather(self._holding, self._group)
        all_gather_flat(self._headers.view(-1), header, self._group)
        for bucket in self._buckets[: self._started]:
            bucket.finish()
        return self._headers

    def rest(self) -> None:
        """Gives the memory of nodes back, after all views of ``staging`` have been made and until the next step."""
        for bucket in self._buckets:
            if isinstance(bucket, _RowBucket):
                bucket.give_memory_back()

    def total(self, bucket: int) -> Tensor:
        """This rank's rows of the sums of a bucket's members, one after the other. See ``Reducer.total``."""
        return self._buckets[bucket].total

    def _make_bucket(self, shape: BucketShape, slots: int) -> _RowBucket | OrderedBucket:
        if shape.members:
            return _RowBucket(shape, self._ranks, self._rank, slots, self._device)
        return OrderedBucket(shape, self._ranks, slots, self._device)


class _RowBucket:
    """The gradients of some parameters: whole nodes of this rank's micro-batches come in, its rows of the sums go out.

    Args:
        shape: of the bucket, with the shapes of its members.
        ranks: how many share rows out.
        rank: which of them this is.
        slots: the most nodes of a rank.
        device: where it is.
    """

    def __init__(self, shape: BucketShape, ranks: int, rank: int, slots: int, device: torch.device) -> None:
        self._pieces = [list(_pieces(shape.members, ranks, each)) for each in range(ranks)]
        self._sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in self._pieces]
        self._nodes = torch.zeros(slots, shape.numel, dtype=shape.dtype, device=device)
        self._bytes = self._nodes.untyped_storage().nbytes()
        self._own = self._sizes[rank]
        self.total = torch.zeros(self._own, dtype=shape.dtype, device=device)
        self._sent = self._received = self.total
        self._work: dist.Work | None = None

    def take_memory(self) -> None:
        """Makes room for a step's nodes, which views of ``staging`` then see."""
        self._nodes.untyped_storage().resize_(self._bytes)

    def staging(self, slot: int) -> Tensor:
        """Where this rank writes its node number ``slot``."""
        return self._nodes[slot]

    def bytes_sent(self, nodes: int) -> int:
        """Bytes that a rank with so many nodes gives to others."""
        others: int = sum(self._sizes) - self._own
        return nodes * others * self.total.element_size()

    def send(self, holding: Holding, rank: int, group: dist.ProcessGroup) -> None:
        """Begins [1] for the nodes of this rank; does not wait."""
        counts = [len(nodes) for nodes in holding.ranks]
        parts = [
            node[piece] for pieces in self._pieces for node in self._nodes[: counts[rank]] for piece in pieces
        ]
        self._sent = torch.cat(parts) if parts else self.total.new_empty(0)
        self._received = self.total.new_empty(sum(counts) * self._own)
        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            output_split_sizes=[count * self._own for count in counts],
            input_split_sizes=[counts[rank] * size for size in self._sizes],
            group=group,
            async_op=True,
        )

    def fold_and_gather(self, holding: Holding, group: dist.ProcessGroup) -> None:
        """Waits for [1] and does [2]; there is nothing to gather."""
        assert self._work is not None
        self._work.wait()
        nodes = list(chain.from_iterable(holding.ranks))
        parts = self._received.view(len(nodes), self._own)
        self.total.copy_(fold(zip(nodes, parts), holding.leaves, lambda left, right: left.add_(right)))

    def finish(self) -> None:
        """Gives the memory of nodes and messages back."""
        self._sent = self._received = self.total
        self._work = None
        self.give_memory_back()

    def give_memory_back(self) -> None:
        """Keeps the views of ``staging`` without what they see, until ``take_memory``."""
        self._nodes.untyped_storage().resize_(0)


def _pieces(members: tuple[tuple[int, ...], ...], ranks: int, rank: int) -> Iterator[slice]:
    """Where the rows of a rank lie in the flat members, one after the other."""
    offset = 0
    for shape in members:
        rows, width = rows_of(shape[0], ranks, rank), prod(shape[1:])
        yield slice(offset + rows.start * width, offset + rows.stop * width)
        offset += prod(shape)
