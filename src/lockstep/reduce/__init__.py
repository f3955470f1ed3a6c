"""Ways to sum gradients over ranks, and the choice of one by name: ``open_reducer``."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lockstep.config.strategy_options import REDUCERS
from lockstep.core.world import wants_fused_reduction
from lockstep.distributed.collectives import gather_json
from lockstep.distributed.process_group import open_group
from lockstep.distributed.shared_memory import can_share_memory
from lockstep.errors import ConfigError, nearest
from lockstep.reduce.comm_hook import OrderedHookState, ordered_hook
from lockstep.reduce.ordered import Bf16Reducer, OrderedReducer
from lockstep.reduce.powersgd import PowerSgdReducer
from lockstep.reduce.reducer import BucketShape, NodeLayout, Reducer
from lockstep.reduce.ring import RingReducer
from lockstep.reduce.shared_memory import SharedMemoryReducer
from lockstep.runtime.devices import is_gpu

logger = logging.getLogger(__name__)

__all__ = [
    "BucketShape",
    "NodeLayout",
    "OrderedHookState",
    "OrderedReducer",
    "Reducer",
    "RingReducer",
    "SharedMemoryReducer",
    "open_reducer",
    "ordered_hook",
]


def open_reducer(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float,
    shared: bool = True,
    *,
    powersgd_rank: int = 4,
    may_fuse: bool = False,
) -> Reducer:
    """The reducer of that name for the ranks of ``group``. Collective.

    ``ordered`` goes through shared memory where all ranks are CPU ranks of one host (and ``shared`` allows it), else
    through collectives; both give the same bits.

    Args:
        name: one of ``REDUCERS``; ``ConfigError`` for any other.
        group: the data-parallel ranks.
        timeout: seconds a rank waits for another's numbers in shared memory.
        shared: whether shared memory may be used.
        powersgd_rank: columns of the factors of ``powersgd``.
        may_fuse: whether ``ordered`` may be one kernel on CUDA, if the user has turned that on; same bits.
    """
    if name == "ring":
        return RingReducer(group, device)
    if name == "bf16":
        return Bf16Reducer(group, _gather_group(group, device), device)
    if name == "powersgd":
        exact, left, right = (open_reducer("ordered", group, device, timeout, shared) for _ in range(3))
        return PowerSgdReducer(group, device, powersgd_rank, exact=exact, left=left, right=right)
    if name != "ordered":
        raise ConfigError(f"reduce {name!r} is not known.{nearest(name, REDUCERS)}")
    if shared and can_share_memory(group, device):
        return SharedMemoryReducer(group, timeout)
    ordered = OrderedReducer(group, _gather_group(group, device), device)
    return _fused(ordered, group, device, timeout) if may_fuse and is_gpu(device) else ordered


def _fused(ordered: OrderedReducer, group: dist.ProcessGroup, device: torch.device, timeout: float) -> OrderedReducer:
    """The fused kernel, if it is turned on; ``ordered`` where it is not possible or not equal, with a line in the log.

    Collective.
    """
    wanted, reason = wants_fused_reduction(), ""
    if wanted:
        try:
            from lockstep.reduce.fused import open_fused
        except Exception as error:  # Triton also looks for a driver when it is imported
            reason = str(error)
    said = gather_json([wanted, reason], group, device)
    if not any(wants for wants, _ in said):
        return ordered
    if not all(wants for wants, _ in said):
        reason = "it is turned on for some ranks only"
    reason = reason or next(filter(None, (each for _, each in said)), "")
    if not reason:
        return open_fused(ordered, group, device, timeout)
    if dist.get_rank(group) == 0:
        logger.warning("Gradients are summed by collectives, not by the fused kernel: %s.", reason)
    return ordered


def _gather_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group over which sums are gathered. Collective.

    On a CPU it is another one of the same ranks, whose collectives keep an order of their own: a rank gathers once the
    others' numbers have arrived. On CUDA all ranks issue all collectives in one order, and one communicator is enough.
    """
    if device.type != "cpu":
        return group
    ranks = dist.get_process_group_ranks(group)
    part = len(ranks) < dist.get_world_size()  # then other ranks make groups of their own at the same time
    return open_group(ranks, use_local_synchronization=part)
