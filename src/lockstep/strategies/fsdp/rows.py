"""How FSDP2 shares a tensor out: by rows (dim 0), each rank a run of ceil(rows / ranks), the last ones fewer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import all_gather_flat


def rows_of(rows: int, ranks: int, rank: int) -> slice:
    """The rows of a rank."""
    size = -(-rows // ranks)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


def gather_rows(part: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor from every rank's rows. Collective.

    Args:
        part: this rank's rows.
        shape: of the whole tensor.
        group: the ranks.
    """
    ranks = dist.get_world_size(group)
    most = -(-shape[0] // ranks)
    padded = part.new_zeros(most, *shape[1:])
    padded[: part.shape[0]] = part
    whole = part.new_empty(ranks * most, *shape[1:])
    all_gather_flat(whole.view(-1), padded.view(-1), group)
    return whole[: shape[0]]
