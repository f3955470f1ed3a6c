"""Ordered all-reduce in one kernel: each GPU reads its shard of a bucket from all others, adds, and writes to all.

    staging   | rank 0: node, node | rank 1: node, node | ...    symmetric memory, which every GPU of the host reaches
    barrier     all nodes of the bucket are written
    kernel      rank j loads shard j of all nodes, adds them in the order of the tree in registers, and stores the sum
                over the first node of every rank; nobody else reads or writes shard j
    barrier     all sums are written
    copy        of the first node to ``total``

The adds are those of ``OrderedReducer``, one by one, so the bits are equal; both run, and are compared, before this one
is taken (``open_fused``). What waits for other ranks is torch's barrier on signal pads, which ends the process after a
time limit. Written in Triton, for numbers of float types; other buckets go through collectives.

Off unless ``LOCKSTEP_FUSED_REDUCTION=1``, because nobody has run it on several GPUs yet (docs/decisions/0043).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
import triton.language as tl
from torch import Tensor

from lockstep.core.summation_tree import merges_after_nodes
from lockstep.distributed.collectives import gather_json
from lockstep.distributed.shared_memory import host_identity
from lockstep.reduce.ordered import OrderedBucket, OrderedReducer
from lockstep.reduce.reducer import BucketShape, NodeLayout, shard_edge
from lockstep.runtime.devices import current_stream, is_gpu

logger = logging.getLogger(__name__)

_ALIGNED = 128
"""Bytes; every node begins at a multiple."""
_BLOCK = 1024
"""Numbers that one program adds."""
_MOST_RANKS = 8
"""The GPUs that are compared in tests; a host has no more."""
_KINDS = {
    torch.float32: (tl.float32, tl.float32),
    torch.float64: (tl.float64, tl.float64),
    torch.float16: (tl.float16, tl.float32),
    torch.bfloat16: (tl.bfloat16, tl.float32),
}
"""Number types, with the type in which two are added before the sum is rounded, as torch does it on CUDA."""
_TRIAL_NUMBERS = (1, 33, 4097, 100_003)
_TRIAL_SECONDS = 60.0
_LONGEST_SECONDS = 86_400.0


class PeerMemory(Protocol):
    """Memory of one size on each rank, which the devices of all ranks read and write."""

    own: Tensor
    """This rank's, uint8, flat."""
    addresses: list[int]
    """Where the memory of each rank begins, as this rank's device sees it."""

    def barrier(self) -> None:
        """Waits until all ranks are here, in the order of the current stream; what they wrote is visible then."""


class SymmetricMemory:
    """``PeerMemory`` of torch's symmetric memory. Collective.

    Args:
        size: bytes.
        group: the ranks, all on one host.
        timeout: seconds after which a barrier ends the process with a CUDA error.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self.own, group)
        self.addresses = [
            self._handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(dist.get_world_size(group))
        ]
        if self.addresses[dist.get_rank(group)] != self.own.data_ptr():
            raise RuntimeError("torch gives another address of this rank's own symmetric memory than the tensor's")
        self._milliseconds = int(min(timeout, _LONGEST_SECONDS) * 1000)

    def barrier(self) -> None:
        """See ``PeerMemory.barrier``."""
        self._handle.barrier(channel=0, timeout_ms=self._milliseconds)


OpenMemory = Callable[[int, dist.ProcessGroup, torch.device, float], PeerMemory]


class FusedReducer(OrderedReducer):
    """Sums in the order of the gradient tree by one kernel for each bucket.

    Args:
        group: the data-parallel ranks; headers, and buckets of integers, go over it.
        open_memory: makes ``PeerMemory`` of a number of bytes. Collective.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, open_memory: Callable[[int], PeerMemory]
    ) -> None:
        super().__init__(group, group, device)
        self._open_memory = open_memory

    def _make_buckets(self, buckets: list[BucketShape], slots: int) -> list[OrderedBucket]:
        sizes = [slots * _node_bytes(shape) if shape.dtype in _KINDS else 0 for shape in buckets]
        *places, size = [0, *accumulate(sizes)]
        memory = self._open_memory(max(size, _ALIGNED))
        return [
            FusedBucket(shape, self._rank, self._ranks, slots, memory, place)
            if shape.dtype in _KINDS
            else self._make_bucket(shape, slots)
            for shape, place in zip(buckets, places)
        ]


class FusedBucket(OrderedBucket):
    """A bucket whose nodes lie in memory of peers, from the byte ``place`` on."""

    def __init__(self, shape: BucketShape, rank: int, ranks: int, slots: int, memory: PeerMemory, place: int) -> None:
        self._numel, self._rank, self._ranks, self._memory = shape.numel, rank, ranks, memory
        self._edges = [shard_edge(shape.numel, ranks, edge) for edge in (rank, rank + 1)]
        self._shard = -(-shape.numel // ranks)
        self._node_bytes, self._place = _node_bytes(shape), place
        held = memory.own[place : place + slots * self._node_bytes].view(shape.dtype)
        self._outgoing = held.view(slots, -1)
        self._outgoing.zero_()
        self.total = torch.zeros(shape.numel, dtype=shape.dtype, device=held.device)
        self._tables: dict[NodeLayout, Tensor] = {}
        self._written: torch.cuda.Event | None = None

    def renew(self) -> None:
        """Gives other memory to ``total``."""
        self.total = torch.zeros_like(self.total)

    def send(self, layout: NodeLayout, rank: int, group: dist.ProcessGroup) -> None:
        """Notes that this rank's nodes are written, on the current stream."""
        if is_gpu(self.total.device):
            self._written = current_stream(self.total.device).record_event()

    def has_arrived(self) -> bool:
        """True: the barrier waits for the others' nodes."""
        return True

    def fold_and_gather(self, layout: NodeLayout, group: dist.ProcessGroup) -> None:
        """Adds this rank's shard of all ranks' nodes, and writes it to all ranks, on the current stream."""
        if self._written is not None:
            current_stream(self.total.device).wait_event(self._written)
        self._memory.barrier()
        add_shard(
            self._table(layout),
            merges_after_nodes(chain.from_iterable(layout.ranks), layout.leaves),
            self._ranks,
            self._edges,
            self.total.dtype,
        )
        self._memory.barrier()
        self.total.copy_(self._outgoing[0, : self._numel])

    def finish(self) -> None:
        """Does nothing: the reducer waits for the stream."""

    def _table(self, layout: NodeLayout) -> Tensor:
        """The addresses of all nodes in the order of the tree, and of the first node of each rank, on the device."""
        if layout not in self._tables:
            begins = [address + self._place for address in self._memory.addresses]
            nodes = [
                begin + slot * self._node_bytes
                for begin, held in zip(begins, layout.ranks)
                for slot in range(len(held))
            ]
            table = torch.tensor([*nodes, *begins], dtype=torch.int64)
            if is_gpu(self.total.device):
                table = table.pin_memory().to(self.total.device, non_blocking=True)
            self._tables[layout] = table
        return self._tables[layout]


def add_shard(table: Tensor, merges: tuple[int, ...], ranks: int, edges: Sequence[int], dtype: torch.dtype) -> None:
    """Adds numbers ``edges[0] <= i < edges[1]`` of all nodes, and stores the sums on every rank.

    Args:
        table: addresses of the nodes in the order of the tree, then of where each rank gets the sums; int64.
        merges: how often the two topmost sums merge after each node.
        ranks: number of places that get the sums.
        edges: of the shard.
        dtype: of the numbers.
    """
    begin, end = edges
    if begin == end:
        return
    narrow, wide = _KINDS[dtype]
    programs = (triton.cdiv(end - begin, _BLOCK),)
    _add_shard[programs](table, begin, end, merges, ranks, narrow, wide, _BLOCK)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add_shard(  # type: ignore[no-untyped-def]  # as above
    table,  # noqa: ANN001  # Triton reads annotations
    begin,  # noqa: ANN001
    end,  # noqa: ANN001
    MERGES: tl.constexpr,
    RANKS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK numbers of the shard. The stack has the sums that wait for their right half."""
    offsets = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < end
    stack = ()  # a tuple for Triton, whose length is known when it compiles
    for node in tl.static_range(len(MERGES)):
        address = tl.load(table + node).to(tl.pointer_type(NARROW))
        value = tl.load(tl.multiple_of(address, 16) + offsets, mask=inside)
        for _ in tl.static_range(tl.constexpr(MERGES[node])):
            value = (stack[-1].to(WIDE) + value.to(WIDE)).to(NARROW)  # type: ignore[misc]  # see above
            stack = stack[:-1]
        stack = stack + (value,)  # type: ignore[assignment]  # noqa: RUF005  # Triton knows no other way
    for rank in tl.static_range(RANKS):
        address = tl.load(table + len(MERGES) + rank).to(tl.pointer_type(NARROW))
        tl.store(tl.multiple_of(address, 16) + offsets, stack[0], mask=inside)  # type: ignore[misc]  # see above


def open_fused(
    ordered: OrderedReducer,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float,
    open_memory: OpenMemory = SymmetricMemory,
) -> OrderedReducer:
    """The fused reducer, if its sums were those of ``ordered`` on all ranks; else that one, and a line in the log.

    Collective. Every rank says over the group whether it can continue before each step that waits for the others.

    Args:
        ordered: sums by collectives; nothing is allocated yet.
        timeout: seconds after which a barrier ends the process.
        open_memory: as ``SymmetricMemory``, which takes the place of it in tests.
    """
    said = gather_json([_why_not(group), host_identity()], group, device)
    hosts = {host for _, host in said}
    reasons = [reason for reason, _ in said]
    if len(hosts) > 1 or hosts == {""}:
        reasons.append("the ranks are not on one host, or do not see each other's processes")
    if not any(reasons):
        reasons = gather_json(_trial(ordered, group, device, open_memory), group, device)
    reason = next(filter(None, reasons), "")
    if dist.get_rank(group) == 0:
        if reason:
            logger.warning("Gradients are summed by collectives, not by the fused kernel: %s.", reason)
        else:
            logger.info("Gradients are summed by the fused kernel, after its sums were those of the collectives.")
    if reason:
        return ordered
    return FusedReducer(group, device, lambda size: open_memory(size, group, device, timeout))


def _why_not(group: dist.ProcessGroup) -> str:
    ranks = dist.get_world_size(group)
    return f"it was made for at most {_MOST_RANKS} ranks, and there are {ranks}" if ranks > _MOST_RANKS else ""


def _trial(ordered: OrderedReducer, group: dist.ProcessGroup, device: torch.device, open_memory: OpenMemory) -> str:
    """Sums the same numbers in both ways; returns what was wrong, or nothing. Collective."""
    ranks = dist.get_world_size(group)
    shapes = [BucketShape(numel, dtype) for dtype in _KINDS for numel in _TRIAL_NUMBERS]
    found: list[list[Tensor]] = []
    try:
        for reducer in (
            ordered,
            FusedReducer(group, device, lambda size: open_memory(size, group, device, _TRIAL_SECONDS)),
        ):
            reducer.allocate(shapes, 1, 2 * ranks + 1)
            found.append([])
            for leaves in (ranks, 2 * ranks + 1, 1):
                found[-1] += _trial_sums(reducer, shapes, leaves, group, device)
        for expected, total in zip(*found):
            if not torch.equal(expected.view(torch.uint8), total.view(torch.uint8)):
                return f"a sum of {len(total)} numbers ({total.dtype}) had other bits"
    except Exception as error:  # whatever Triton, the driver or torch's symmetric memory cannot do here
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _trial_sums(
    reducer: OrderedReducer,
    shapes: list[BucketShape],
    leaves: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """The totals of one step with numbers of very different sizes, so that the order of adds shows."""
    generator = torch.Generator().manual_seed(1000 * leaves + dist.get_rank(group))
    held = NodeLayout.of(leaves, dist.get_world_size(group)).ranks[dist.get_rank(group)]
    reducer.begin(leaves)
    for bucket, shape in enumerate(shapes):
        for slot in range(len(held)):
            sizes = 10.0 ** torch.randint(-3, 4, (shape.numel,), generator=generator)
            values = torch.randn(shape.numel, generator=generator) * sizes
            reducer.staging(bucket, slot).copy_(values.to(shape.dtype))
        reducer.start(bucket)
    reducer.finish(torch.zeros(1, dtype=torch.float64, device=device))
    return [reducer.total(bucket).clone() for bucket in range(len(shapes))]


def _node_bytes(shape: BucketShape) -> int:
    return -(-shape.numel * shape.dtype.itemsize // _ALIGNED) * _ALIGNED
