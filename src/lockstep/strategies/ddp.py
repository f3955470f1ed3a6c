"""Data parallel, a process and a replica per device; gradients are reduced while backward runs.

        rank 0:  k0 k1 k2 k3 =\\
                               reduce in the tree's order -> the same update on every rank
        rank 1:  k4 k5 k6 k7 =/

torch's DistributedDataParallel is not underneath: it re-buckets after the first step, cannot hold the tree's partial
sums, fires no hook on a rank without a micro-batch, and has to be told about unused parameters
(docs/decisions/0002-gradient-hooks.md). Its users can have the same order through
``lockstep.reduce.ordered_hook``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.plan import Share
from lockstep.reduce import Reducer
from lockstep.strategies.replicated import Replicated


class DistributedDataParallel(Replicated):
    """Shares the micro-batches of a step over the ranks of a group.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        reducer: sums gradients over the ranks; decides the level.
        group: the ranks.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "ddp"

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer,
        group: dist.ProcessGroup,
        running_buffers: Sequence[str] = (),
    ) -> None:
        super().__init__(
            device,
            micro_batches,
            reducer,
            Share(holder=dist.get_rank(group), holders=dist.get_world_size(group)),
            running_buffers,
        )
        self.level = reducer.level
        self._group = group

    def release(self) -> None:
        """See ``Strategy.release``."""
        let_go_of_groups(self)
        if self._reducer is not None:
            self._reducer.release()

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all ranks, shape (ranks, n). Collective."""
        rows = torch.empty(self.share.holders, row.numel(), dtype=row.dtype, device=row.device)
        all_gather_flat(rows.view(-1), row.contiguous(), self._group)
        return rows
