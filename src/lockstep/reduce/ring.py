"""The backend's own all-reduce (a ring on gloo and NCCL): level B, since it adds in an order of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.strategy_options import REDUCERS
from lockstep.distributed.collectives import all_gather_flat
from lockstep.reduce.reducer import BucketShape, NodeLayout, Reducer, most_slots
from lockstep.runtime.stack_dump import Mark, stack_marker


class RingReducer(Reducer):
    """Adds a rank's nodes to one tensor and hands it to ``all_reduce``."""

    level = REDUCERS["ring"]

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._staging: list[Tensor] = []
        self._work: list[dist.Work | None] = []
        self._nodes = 0

    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """See ``Reducer.allocate``."""
        slots = most_slots(leaves, self._ranks)
        self._staging = [torch.zeros(slots, b.numel, dtype=b.dtype, device=self._device) for b in buckets]
        self._headers = torch.zeros(self._ranks, header, dtype=torch.float64, device=self._device)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``."""
        self._nodes = len(NodeLayout.of(leaves, self._ranks).ranks[self._rank])
        self._work = []

    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """See ``Reducer.staging``."""
        return self._staging[bucket][slot]

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``."""
        staging = self._staging[bucket]
        if self._nodes == 0:
            staging[0].zero_()
        for slot in range(1, self._nodes):
            staging[0].add_(staging[slot])
        self._work.append(dist.all_reduce(staging[0], group=self._group, async_op=True))
        self.bytes_sent += 2 * (self._ranks - 1) * staging[0].nbytes // self._ranks

    @stack_marker(Mark.WAITS_FOR_GRADIENTS)
    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        headers = all_gather_flat(self._headers.view(-1), header, self._group, async_op=True)
        for work in [*self._work, headers]:
            if work is not None:
                work.wait()
        return self._headers

    def total(self, bucket: int) -> Tensor:
        """See ``Reducer.total``."""
        return self._staging[bucket][0]

    def renew(self, bucket: int) -> None:
        """See ``Reducer.renew``."""
        self._staging[bucket] = torch.zeros_like(self._staging[bucket])
