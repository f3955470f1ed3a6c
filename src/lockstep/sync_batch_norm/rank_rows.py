"""A small exchange: every rank gives a row of numbers and gets the rows of all, in rank order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.errors import ConfigError
from lockstep.reduce import SharedMemoryReducer
from lockstep.reduce.host_memory import can_share_memory


class RankRows:
    """Gathers rows over a process group, or through memory that CPU ranks of one host share.

    A model's copies share the object: process groups cannot be copied.

    Args:
        group: the ranks; None for one process alone.
        memory: exchanges in the place of the group; only its headers are used.
    """

    def __init__(self, group: dist.ProcessGroup | None, memory: SharedMemoryReducer | None = None) -> None:
        self._group, self._memory = group, memory
        self.ranks = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device, timeout: float, shared: bool) -> RankRows:
        """An exchange whose order is its own, whatever else goes over ``group``. Collective.

        Args:
            group: the ranks.
            device: where the rows are.
            timeout: seconds that a rank waits in shared memory before it names the missing ones (``StallError``).
            shared: whether shared memory may be used, where all ranks are CPU ranks of one host.
        """
        own = dist.new_group(dist.get_process_group_ranks(group))
        possible = shared and can_share_memory(own, device)
        return cls(own, SharedMemoryReducer(own, timeout) if possible else None)

    def make_room(self, width: int) -> None:
        """Makes room for rows of up to ``width`` numbers. Collective; needed before ``gather`` through memory."""
        if self._memory is not None:
            self._row = torch.zeros(width, dtype=torch.float64)
            self._memory.allocate([], width, 1)

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks, shape (ranks, n), from one of shape (n,), float64. Collective; waits for all ranks.

        Raises:
            ConfigError: the ranks have already left each other.
        """
        if self.ranks == 1:
            return row.unsqueeze(0)
        if self._memory is not None:
            self._row[: row.numel()] = row
            self._memory.begin(1)
            return self._memory.finish(self._row)[:, : row.numel()]
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
        if self._memory is not None:
            self._memory.release()
        self._memory = None
        let_go_of_groups(self)

    def __deepcopy__(self, memo: dict[int, object]) -> RankRows:
        return self

    def __reduce__(self) -> tuple[type[RankRows], tuple[None]]:
        """Pickled, as in ``torch.save(model)``, it is that of one process alone."""
        return RankRows, (None,)
