"""Ways to sum gradients over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.errors import ConfigError, nearest
from lockstep.reduce import shared_memory
from lockstep.reduce.comm_hook import OrderedHookState, ordered_hook
from lockstep.reduce.contract import BucketShape, Holding, Reducer
from lockstep.reduce.ordered import OrderedReducer
from lockstep.reduce.ring import RingReducer
from lockstep.reduce.shared_memory import SharedMemoryReducer

__all__ = [
    "REDUCERS",
    "BucketShape",
    "Holding",
    "OrderedHookState",
    "OrderedReducer",
    "Reducer",
    "RingReducer",
    "SharedMemoryReducer",
    "open_reducer",
    "ordered_hook",
]

REDUCERS = ("ordered", "ring")


def open_reducer(
    name: str, group: dist.ProcessGroup, device: torch.device, timeout: float, shared: bool = True
) -> Reducer:
    """The reducer of that name for the ranks of ``group``. Collective.

    ``ordered`` goes through shared memory where all ranks are CPU ranks of one host (and ``shared`` allows it), else
    through collectives; both give the same bits.

    Raises:
        ConfigError: the name is not known.
    """
    if name == "ring":
        return RingReducer(group, device)
    if name != "ordered":
        raise ConfigError(f"reduce {name!r} is not known.{nearest(name, REDUCERS)}")
    if shared and shared_memory.is_possible(group, device):
        return SharedMemoryReducer(group, timeout)
    ranks = dist.get_process_group_ranks(group)
    return OrderedReducer(group, dist.new_group(ranks), device)
