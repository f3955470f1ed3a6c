"""Opens torch's process group over the ranks of a world, after a roll-call that names missing ranks.

    store ──> claim the rank, compare run ids ──> wait for every rank ──> init ──> barrier + destroy
              two runs at one address             "missing: rank 3"

The roll-call comes first because gloo waits five times its timeout for a missing rank, and names none. ``Groups`` are
the process groups of a mesh.
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

from lockstep.core.mesh import OF_DEVICES, Mesh
from lockstep.core.world import LOOPBACK, World, host_name
from lockstep.distributed.network import addresses, interface_towards
from lockstep.distributed.rendezvous import meeting_address, open_store
from lockstep.errors import ConfigError, RankError
from lockstep.runtime.control import Stopped
from lockstep.runtime.heartbeat import Heartbeat, Membership
from lockstep.runtime.stack_dump import Mark, stack_marker
from lockstep.text import numbered, ranges

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
ARRIVAL_LIMIT = 60.0


@contextmanager
@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def open_process_group(
    world: World,
    *,
    backend: str = "gloo",
    timeout: float = DEFAULT_TIMEOUT,
    arrival_limit: float = ARRIVAL_LIMIT,
) -> Iterator[None]:
    """Opens the default process group for a ``with`` block. Collective: every rank must call this.

    A clean end is a barrier and ``destroy_process_group``. After an exception the group is not destroyed, because that
    can wait for ranks that do not answer; the process is expected to end. A world of one has no group.

    Args:
        world: of this process, with the rendezvous.
        backend: ``gloo``, ``nccl`` or ``cpu:gloo,cuda:nccl``; the process selects its GPU beforehand.
        timeout: seconds after which a collective fails.
        arrival_limit: seconds within which every rank must connect.
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
    heartbeat.set_membership(Membership.JOINED)
    try:
        yield
    except Stopped:  # agreed upon by all ranks
        _leave_process_group(heartbeat)
        raise
    _leave_process_group(heartbeat)


@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def roll_call(store: Store, world: World, limit: float) -> None:
    """Waits until every rank of the run has announced itself in the store. Collective.

    After ``limit`` seconds ``RankError`` names the ranks that did not connect.
    """
    name = world.run_id or os.environ.get("TORCHELASTIC_RUN_ID", "")
    run = json.dumps({"run": name, "world_size": world.world_size}, sort_keys=True)
    first = store.compare_set("run", "", run).decode()
    if first != run:
        there = json.loads(first)
        raise ConfigError(
            f"Rank {world.rank} of run {name!r} (world of {world.world_size}) reached "
            f"{world.rendezvous}, which belongs to run {there['run']!r} (world of {there['world_size']}). "
            "Give each run its own address."
        )
    if store.add(f"claims/{world.rank}", 1) != 1:
        raise ConfigError(
            f"Rank {world.rank} connected twice to {world.rendezvous}: two runs share the address, or "
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
        arrived = [rank for rank in range(world.world_size) if rank not in missing]
        raise RankError(
            f"Not every rank connected within {limit:g} s. missing: {numbered('rank', missing)}; "
            f"connected: {ranges(arrived)}. "
            "Check why the missing ranks did not start, or raise the limit if they start slowly."
        ) from error


def _choose_interface(world: World) -> None:
    """Sets the interface for the ranks' data unless the user has: loopback on one host, else that of the rendezvous."""
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
    """Warns once that torchrun's store is open to the network."""
    meeting = meeting_address(world)
    place = "" if meeting is None else f" at {meeting[0]}:{meeting[1]}"
    logger.warning(
        "torchrun's store%s listens on every interface and its agent may unpickle what any client writes there; "
        "protect the port, or start with `lockstep run` (docs/hosts.md)",
        place,
    )


@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def _leave_process_group(heartbeat: Heartbeat) -> None:
    heartbeat.set_membership(Membership.LEAVING)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    heartbeat.set_membership(Membership.FINISHED)


class Groups:
    """One group of ranks for each axis of a mesh that has more than one rank.

    ``world`` is the group of all ranks; None for a world of one. ``axes`` has the group of this rank along each axis.
    """

    def __init__(
        self, mesh: Mesh, world: dist.ProcessGroup | None, axes: dict[str, dist.ProcessGroup]
    ) -> None:
        self.mesh, self.world, self._axes = mesh, world, axes
        self.rank = dist.get_rank(world) if world is not None else 0

    @classmethod
    def open(cls, mesh: Mesh, world: dist.ProcessGroup | None) -> Groups:
        """Makes the groups. Collective: every rank of the world must call this, with the same mesh.

        ``ConfigError`` if the mesh does not take exactly the ranks of the world.
        """
        mesh.check_world(dist.get_world_size(world) if world is not None else 1)
        axes: dict[str, dist.ProcessGroup] = {}
        for name, size in mesh.axes:
            if name in OF_DEVICES or size == 1 or world is None:
                continue
            if size == mesh.ranks:
                axes[name] = world
                continue
            everyone = dist.get_process_group_ranks(world)
            for line in mesh.lines(name):
                group = dist.new_group([everyone[rank] for rank in line])
                if dist.get_rank(world) in line:
                    axes[name] = group
        return cls(mesh, world, axes)

    def along(self, axis: str) -> dist.ProcessGroup | None:
        """Returns the group of the ranks that differ from this one only along ``axis``; None if there is no other."""
        return self._axes.get(axis)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis."""
        return 1 if axis in OF_DEVICES else self.mesh.size(axis)

    def coordinate(self, axis: str) -> int:
        """Returns the coordinate of this rank along an axis."""
        return self.mesh.coordinate(axis, self.rank)

    def release(self) -> None:
        """Drops the references to the groups."""
        self.world, self._axes = None, {}
