"""A small exchange: every rank gives a row of numbers and gets the rows of all, in rank order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.errors import ConfigError


class RankRows:
    """Gathers rows over a process group.

    A model's copies share the object: process groups cannot be copied.

    Args:
        group: the ranks; None for one process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks, shape (ranks, n), from one of shape (n,). Collective; waits for all ranks.

        Raises:
            ConfigError: the ranks have already left each other.
        """
        if self.ranks == 1:
            return row.unsqueeze(0)
        if self._group is None:
            raise ConfigError(
                "A synchronised BatchNorm was called in training mode after its run was closed, and has no ranks to "
                "ask. Call model.eval() first, or use the model before run.close()."
            )
        rows = torch.empty(self.ranks, row.numel(), dtype=row.dtype, device=row.device)
        all_gather_flat(rows.view(-1), row.contiguous(), self._group)
        return rows

    def release(self) -> None:
        """Lets go of the process group."""
        let_go_of_groups(self)

    def __deepcopy__(self, memo: dict[int, object]) -> RankRows:
        return self

    def __reduce__(self) -> tuple[type[RankRows], tuple[None]]:
        """Pickled, as in ``torch.save(model)``, it is that of one process alone."""
        return RankRows, (None,)
