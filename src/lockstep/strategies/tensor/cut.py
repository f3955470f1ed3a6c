"""Which part of a tensor a rank holds, and how the parts make the whole again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A tensor split into equal parts along one dim.

    The queries, keys and values of attention lie one after the other in one dim; a rank holds its part of each:

        blocks=3, 2 ranks     q q q q k k k k v v v v     rank 0:  q q k k v v     rank 1:  q q k k v v
    """

    dim: int
    ranks: int
    rank: int
    blocks: int = 1
    """Equal pieces of the dim, each of which is split."""

    def part(self, whole: Tensor) -> Tensor:
        """What this rank holds, as a tensor of its own."""
        shape = whole.shape
        pieces = whole.reshape(*shape[: self.dim], self.blocks, self.ranks, -1, *shape[self.dim + 1 :])
        mine = pieces.select(self.dim + 1, self.rank)
        return mine.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Tensor) -> Tensor:
        """The whole from all parts, shape (ranks, *shape of a part)."""
        shape = parts.shape
        pieces = parts.reshape(*shape[: self.dim + 1], self.blocks, -1, *shape[self.dim + 2 :])
        return pieces.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def gather(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole on every rank. Collective."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return self.join(torch.stack(parts))
