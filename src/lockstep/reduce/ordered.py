"""Ordered all-reduce over collectives: the gradient tree, whoever holds what.

    [1] all_to_all: every rank sends shard j of its nodes to rank j        as many bytes as the first half of a ring
    [2] each rank folds the nodes of its shard along the tree              explicit adds, in an order that is fixed
    [3] all_gather: every rank gets all folded shards                      the second half of a ring

Collectives only move bytes here, so neither backend, topology nor library version can change a sum. [1] is issued as
soon as a bucket is complete, while backward still runs. [3] is in bucket order; on a CPU it goes over a process group
of its own, so that a rank which is ahead cannot pair it with another rank's [1].
"""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.strategy_options import REDUCERS
from lockstep.core.summation_tree import Node, fold_in_place
from lockstep.distributed.collectives import all_gather_flat
from lockstep.reduce.reducer import BucketShape, NodeLayout, Reducer, most_slots
from lockstep.runtime.devices import current_stream, new_stream, on_stream
from lockstep.runtime.stack_dump import Mark, stack_marker


class OrderedReducer(Reducer):
    """Sums in the order of the gradient tree by ``all_to_all_single``, adds, and ``all_gather``.

    [1] and the headers go over ``group``, that of the data-parallel ranks, and [3] over a second group of the same
    ranks.
    """

    level = REDUCERS["ordered"]

    def __init__(self, group: dist.ProcessGroup, gather_group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._gather_group, self._device = group, gather_group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._side_stream = new_stream(device)
        self._buckets: list[OrderedBucket] = []
        self._layout = NodeLayout(0, ())
        self._started = self._folded = 0

    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """See ``Reducer.allocate``."""
        self._buckets = self._make_buckets(buckets, most_slots(leaves, self._ranks))
        self._headers = torch.zeros(self._ranks, header, dtype=torch.float64, device=self._device)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``."""
        self._layout = NodeLayout.of(leaves, self._ranks)
        self._started = self._folded = 0

    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """See ``Reducer.staging``."""
        return self._buckets[bucket].staging(slot)

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``."""
        self._send(bucket)
        while self._folded < bucket and (self._side_stream is not None or self._buckets[self._folded].has_arrived()):
            self._fold_next()

    @stack_marker(Mark.WAITS_FOR_GRADIENTS)
    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        headers = all_gather_flat(self._headers.view(-1), header, self._group, async_op=True)
        while self._folded < self._started:
            self._fold_next()
        for bucket in self._buckets[: self._started]:
            bucket.finish()
        if headers is not None:
            headers.wait()
        if self._side_stream is not None:
            current_stream(self._device).wait_stream(self._side_stream)
        return self._headers

    def total(self, bucket: int) -> Tensor:
        """See ``Reducer.total``."""
        return self._buckets[bucket].total

    def renew(self, bucket: int) -> None:
        """See ``Reducer.renew``."""
        self._buckets[bucket].renew()

    def _send(self, bucket: int) -> None:
        self._buckets[bucket].send(self._layout, self._rank, self._group)
        self.bytes_sent += self._buckets[bucket].bytes_sent(len(self._layout.ranks[self._rank]))
        self._started += 1

    def _make_buckets(self, buckets: list[BucketShape], slots: int) -> list[OrderedBucket]:
        return [self._make_bucket(shape, slots) for shape in buckets]

    def _make_bucket(self, shape: BucketShape, slots: int) -> OrderedBucket:
        return OrderedBucket(shape, self._ranks, slots, self._device)

    def _fold_next(self) -> None:
        bucket = self._buckets[self._folded]
        self._folded += 1
        with on_stream(self._side_stream):
            bucket.fold_and_gather(self._layout, self._gather_group)


class OrderedBucket:
    """The memory of one bucket, and the state of its exchange."""

    def __init__(self, shape: BucketShape, ranks: int, slots: int, device: torch.device) -> None:
        self._numel, self._ranks = shape.numel, ranks
        self._shard = -(-shape.numel // ranks)
        padded = self._shard * ranks
        self._outgoing = torch.zeros(slots, padded, dtype=shape.dtype, device=device)
        self._by_receiver = torch.zeros(slots * padded, dtype=shape.dtype, device=device) if slots > 1 else None
        self._incoming = torch.zeros(slots * padded, dtype=shape.dtype, device=device)
        self._gathered = self._outgoing[0]  # what was sent has arrived everywhere when the sums come
        self.total = self._gathered[: self._numel]
        """The flat sum, once it is finished."""
        self._work: dist.Work | None = None

    def renew(self) -> None:
        """Gives ``total`` new memory, so that the old may be kept."""
        self._outgoing = torch.zeros_like(self._outgoing)
        self._gathered = self._outgoing[0]
        self.total = self._gathered[: self._numel]

    def staging(self, slot: int) -> Tensor:
        """The memory into which this rank writes its node number ``slot``."""
        return self._outgoing[slot, : self._numel]

    def bytes_sent(self, nodes: int) -> int:
        """Bytes that a rank with this number of nodes sends to others."""
        return (self._ranks - 1) * (nodes + 1) * self._shard * self._outgoing.element_size()

    def send(self, layout: NodeLayout, rank: int, group: dist.ProcessGroup) -> None:
        """Begins [1] for the nodes of this rank; does not wait."""
        mine = len(layout.ranks[rank])
        outgoing = self._outgoing[:mine]
        if mine > 1 and self._by_receiver is not None:
            by_receiver = self._by_receiver[: mine * self._shard * self._ranks]
            by_receiver.view(self._ranks, mine, self._shard).copy_(
                outgoing.view(mine, self._ranks, self._shard).transpose(0, 1)
            )
            outgoing = by_receiver
        nodes = [len(part) for part in layout.ranks]
        self._work = dist.all_to_all_single(
            self._incoming[: sum(nodes) * self._shard],
            outgoing.reshape(-1),
            output_split_sizes=[count * self._shard for count in nodes],
            input_split_sizes=[mine * self._shard] * self._ranks,
            group=group,
            async_op=True,
        )

    def has_arrived(self) -> bool:
        """Returns whether the nodes of the other ranks have arrived."""
        return self._work is not None and self._work.is_completed()

    def fold_and_gather(self, layout: NodeLayout, group: dist.ProcessGroup) -> None:
        """Waits for [1], does [2], and begins [3]."""
        self._wait()
        nodes = list(chain.from_iterable(layout.ranks))
        parts = self._incoming[: len(nodes) * self._shard].view(len(nodes), self._shard)
        self._folded = self._fold(nodes, parts, layout.leaves)
        self._work = all_gather_flat(self._gathered, self._folded, group, async_op=True)

    def finish(self) -> None:
        """Waits for [3]: the sum is in ``total``."""
        self._wait()

    def _fold(self, nodes: list[Node], parts: Tensor, leaves: int) -> Tensor:
        """The folded shard from the ranks' nodes, shape (nodes, shard), which may be overwritten."""
        return fold_in_place(nodes, parts, leaves)

    @stack_marker(Mark.WAITS_FOR_GRADIENTS)
    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class Bf16Reducer(OrderedReducer):
    """Sums float32 and float64 gradients that are exchanged as bfloat16: half the bytes of float32, level B.

        float32 node --round--> bfloat16 --[1]--> float32, [2] --round--> bfloat16 --[3]-->

    Every node of the tree is rounded once before it is sent, and every sum once before it is handed out, to the nearest
    number of 8 significant bits: a relative error of at most u = 2^-8 each. So an entry of the result is off by at most
    2 u + u^2 (0.8 %) of the sum of its nodes' sizes, whatever the number of ranks. All ranks hold the same bits: also
    the one that folded a shard takes the rounded one. Buckets of 16-bit numbers, and those that do not hold gradients
    (running statistics), are summed as they are.
    """

    level = REDUCERS["bf16"]

    def _make_bucket(self, shape: BucketShape, slots: int) -> OrderedBucket:
        rounds = bool(shape.members) and shape.dtype.itemsize > torch.bfloat16.itemsize
        kind = _RoundedBucket if rounds else OrderedBucket
        return kind(shape, self._ranks, slots, self._device)


class _RoundedBucket(OrderedBucket):
    """A bucket that travels as bfloat16: copying a gradient into its staging memory is what rounds it."""

    def __init__(self, shape: BucketShape, ranks: int, slots: int, device: torch.device) -> None:
        super().__init__(dataclasses.replace(shape, dtype=torch.bfloat16), ranks, slots, device)
        self.total = torch.zeros(shape.numel, dtype=shape.dtype, device=device)

    def renew(self) -> None:
        self.total = torch.zeros_like(self.total)

    def finish(self) -> None:
        super().finish()
        self.total.copy_(self._gathered[: self._numel])

    def _fold(self, nodes: list[Node], parts: Tensor, leaves: int) -> Tensor:
        return super()._fold(nodes, parts.to(self.total.dtype), leaves).to(torch.bfloat16)
