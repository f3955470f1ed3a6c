"""Opens torch's process group over the ranks of a world, after a roll-call that names who is missing.

    store ──> claim the rank, compare run ids ──> wait for every rank ──> init ──> barrier + destroy
              two runs on one meeting place       "missing: rank 3"

The roll-call comes first because gloo, once it connects, waits five times its timeout for a rank that never
comes, and names nobody.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.errors import ConfigError, RankError
from lockstep.launch.control import Stopped
from lockstep.launch.heartbeat import Heartbeat
from lockstep.launch.hosts.interface import addresses, interface_towards
from lockstep.launch.place import LOOPBACK
from lockstep.rendezvous import meeting_address, open_store
from lockstep.world import World, host_name

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
ARRIVAL_LIMIT = 60.0


@contextmanager
def open_process_group(
    world: World,
    *,
    backend: str = "gloo",
    timeout: float = DEFAULT_TIMEOUT,
    arrival_limit: float = ARRIVAL_LIMIT,
) -> Iterator[None]:
    """Opens the default process group for a ``with`` block. Collective: every rank must call this.

    A clean end is a barrier and ``destroy_process_group``. After an exception the group is left as it is,
    because destroying it can wait for ranks that will not answer; the process is expected to end. A world of
    one gets none.

    Args:
        world: who this process is and where the ranks meet.
        backend: ``gloo``, ``nccl`` or ``cpu:gloo,cuda:nccl``; which GPU is this process' own, it chooses beforehand.
        timeout: seconds after which a collective fails.
        arrival_limit: seconds within which every rank must arrive.
    """
    if world.world_size == 1:
        yield
        return
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("start")
    timeout, arrival_limit = world.patience(timeout), world.patience(arrival_limit)
    store = open_store(world, arrival_limit)
    roll_call(store, world, arrival_limit)
    _choose_interface(world)
    if world.launcher == "torchrun" and world.is_main:
        _name_open_store(world)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout),
    )
    heartbeat.mark_joined()
    try:
        yield
    except Stopped:  # agreed upon by all ranks
        _part(heartbeat)
        raise
    _part(heartbeat)


def roll_call(store: Store, world: World, limit: float) -> None:
    """Waits until every rank of the run has announced itself. Collective.

    Args:
        store: the meeting place, not shared with another use.
        world: who this process is.
        limit: seconds to wait; then ``RankError`` names the ranks that did not arrive.
    """
    run = json.dumps({"run": _run_name(world), "world_size": world.world_size}, sort_keys=True)
    first = store.compare_set("run", "", run).decode()
    if first != run:
        there = json.loads(first)
        raise ConfigError(
            f"Rank {world.rank} of run {_run_name(world)!r} (world of {world.world_size}) reached "
            f"{world.rendezvous}, which belongs to run {there['run']!r} (world of {there['world_size']}). "
            "Give each run its own address."
        )
    if store.add(f"claims/{world.rank}", 1) != 1:
        raise ConfigError(
            f"Rank {world.rank} was announced twice at {world.rendezvous}: two runs share the address, or "
            "two processes have the same RANK. Give each run its own address and each process its own rank."
        )
    store.set(f"arrived/{world.rank}", json.dumps({"host": host_name(), "pid": os.getpid()}))
    keys = [f"arrived/{rank}" for rank in range(world.world_size)]
    try:
        store.wait(keys, timedelta(seconds=limit))
    except (RuntimeError, ValueError) as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise _absent(missing, world, limit) from error


def _absent(missing: list[int], world: World, limit: float) -> RankError:
    arrived = [rank for rank in range(world.world_size) if rank not in missing]
    return RankError(
        f"Not every rank arrived within {limit:g} s. missing: {_ranks(missing)}; "
        f"arrived: {_ranks(arrived, bare=True)}. "
        "Look at why the missing ones did not start; a slow start can be given more time."
    )


def _ranks(ranks: list[int], *, bare: bool = False) -> str:
    text = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return text if bare else f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _run_name(world: World) -> str:
    return world.run_id or os.environ.get("TORCHELASTIC_RUN_ID", "")


def _choose_interface(world: World) -> None:
    """Names the interface for the ranks' data, unless the user has: loopback on one host, else where they meet."""
    if world.is_one_host:
        name = exact = LOOPBACK
    else:
        meeting = meeting_address(world)
        found = None if meeting is None else interface_towards(*meeting, addresses())
        if found is None or found.name in ("", LOOPBACK):
            return
        name, exact = found.name, f"={found.name}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", exact)


def _name_open_store(world: World) -> None:
    """Says once what torchrun leaves open: no promise of ours covers it."""
    meeting = meeting_address(world)
    place = "" if meeting is None else f" at {meeting[0]}:{meeting[1]}"
    logger.warning(
        "torchrun's store%s listens on every interface and its agent may unpickle what strangers write there; "
        "keep the port closed to them, or start with `lockstep run` (docs/hosts.md)",
        place,
    )


def _part(heartbeat: Heartbeat) -> None:
    heartbeat.mark_leaving()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    heartbeat.mark_finished()
