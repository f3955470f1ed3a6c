"""How tensors are shared out by rows (dim 0), as FSDP2 does: a run of ceil(rows / ranks) each, the last ranks fewer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import all_gather_flat
from lockstep.errors import ConfigError
from lockstep.sums import fold_rows, row_squares


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


def squares_of_rows(
    gradients: Sequence[Tensor | None], rows: Sequence[int], device: torch.device, group: dist.ProcessGroup
) -> list[Tensor]:
    """The sum of squares of each whole gradient, float64, 0-dim: as ``sums.sum_of_squares`` gives it. Collective.

    Args:
        gradients: this rank's rows of each; None counts as zeros.
        rows: of each whole gradient.
        device: where the sums are.
        group: the ranks that hold rows.
    """
    ranks = dist.get_world_size(group)
    sizes = [-(-count // ranks) for count in rows]
    mine = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    for gradient, part in zip(gradients, torch.split(mine, sizes)):
        if gradient is not None and gradient.numel():
            part[: gradient.shape[0]] = row_squares(gradient)
    everyone = torch.empty(ranks, mine.numel(), dtype=torch.float64, device=device)
    all_gather_flat(everyone.view(-1), mine, group)
    parts = torch.split(everyone, sizes, dim=1)
    return [fold_rows(part.reshape(-1)[:count]) for part, count in zip(parts, rows)]


def require_rows(model: nn.Module, strategy: str) -> None:
    """Raises ``ConfigError`` naming a parameter of a model that cannot be shared out by rows."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"Strategy {strategy!r} shares parameters out by rows, and {name!r} is a single number. Give it the "
                "shape (1,), or use strategy 'ddp'."
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"Strategy {strategy!r} shares contiguous parameters out, and {name!r} is stored in channels-last "
                "order. Use channels_last=False, or strategy 'ddp'."
            )
