"""Opens torch's process group over the ranks of a world, after a roll-call that names missing ranks.

    store ──> claim the rank, compare run ids ──> wait for every rank ──> init ──> check peers ──> barrier + destroy
              two runs at one address             "missing: rank 3"                "not by rank 1"

The roll-call comes first because gloo waits five times its timeout for a missing rank, and names none. Gloo takes
whoever connects to its port with the right number for the rank that it waits for, so the ends of each connection prove
to each other that they know a secret from the store, before a group is used. ``Groups`` are the process groups of a
mesh.

NCCL makes the communicator of a group when the group is first used, and there waits for all of its ranks. ``connect``
uses a group at once, so that all ranks make theirs in one order before the first step (docs/decisions/0042).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # has the open group as a default argument for ever where it is imported later
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.core.mesh import OF_DEVICES, Mesh
from lockstep.core.world import LOOPBACK, World, host_name
from lockstep.distributed.authentication import PROOF_BYTES, read_rank_key, sign
from lockstep.distributed.network import addresses, interface_towards, require_loopback
from lockstep.distributed.rendezvous import meeting_address, of_an_earlier_program, open_store
from lockstep.errors import ConfigError, RankError
from lockstep.runtime.control import Stopped
from lockstep.runtime.devices import is_gpu
from lockstep.runtime.heartbeat import Heartbeat, Membership
from lockstep.runtime.stack_dump import Mark, stack_marker
from lockstep.text import numbered, ranges

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
ARRIVAL_LIMIT = 60.0


class _Stores:
    """The store of this process, which is kept: programs train several models, and open a group for each.

    Each group has keys of its own there. A store that was opened again could still be the one that others are leaving.
    """

    def __init__(self) -> None:
        self.groups = 0
        """How many have been opened; equal on all ranks."""
        self._kept: tuple[object, Store] | None = None

    def open(self, world: World, limit: float) -> Store:
        """The part of the store that is for the next group, opened in at most ``limit`` seconds."""
        place = world.rendezvous, meeting_address(world)
        if self._kept is None or self._kept[0] != place:
            self._kept, self.groups = (place, open_store(world, limit)), 0
        store = self._kept[1]
        return PrefixStore(f"again/{self.groups}", store) if self.groups else store


_stores = _Stores()


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
    store = _stores.open(world, arrival_limit)
    roll_call(store, world, arrival_limit)
    _stores.groups += 1
    _choose_interface(world)
    if world.launcher == "torchrun" and world.is_main and _stores.groups == 1:
        _name_open_store(world)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout),
    )
    check_peers(limit=arrival_limit)
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
            f"Rank {world.rank} of run {name!r} (world of {world.world_size}) reached {world.rendezvous}, which "
            f"belongs to run {there['run']!r} (world of {there['world_size']}). Give each run its own address."
        )
    if store.add(f"claims/{world.rank}", 1) != 1:
        raise ConfigError(
            f"Rank {world.rank} connected twice to {world.rendezvous}: two runs share the address, or "
            "two processes have the same RANK. Give each run its own address and each process its own rank. A program "
            "that a process of this run starts must not get its RANK and WORLD_SIZE: env -u RANK -u WORLD_SIZE PROGRAM."
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
            f"Not every rank connected within {limit:g} s. missing: {numbered('rank', missing)}; connected: "
            f"{ranges(arrived)}. Check why the missing ranks did not start, or raise the limit if they start slowly."
            f"{of_an_earlier_program(world) if arrived == [world.rank] else ''}"
        ) from error


def open_group(
    ranks: Sequence[int] | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    use_local_synchronization: bool = False,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Opens a further group with ``torch.distributed.new_group``, and checks its peers. Collective, as that is.

    The arguments are that one's but ``device``: where the group's collectives will be, so that it is connected now.
    """
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend, use_local_synchronization=use_local_synchronization
    )
    if dist.get_rank(group) >= 0:
        check_peers(group)
        connect(group, device)
    return group


def connect(group: dist.ProcessGroup, device: torch.device | None) -> None:
    """Makes the NCCL communicator of a group now, with a sum of one number. Collective; does nothing on a CPU."""
    if device is not None and is_gpu(device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def connect_pair(source: int, target: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sends a number from one global rank to another; other ranks, and a CPU, do nothing.

    NCCL has a communicator for each pair of ranks that send and receive, which it makes when they first do.
    """
    me = dist.get_rank()
    if not is_gpu(device) or me not in (source, target):
        return
    number = torch.zeros(1, device=device)
    if me == source:
        dist.send(number, target, group=group)
    else:
        dist.recv(number, source, group=group)


def check_peers(group: dist.ProcessGroup | None = None, limit: float = ARRIVAL_LIMIT) -> None:
    """Makes sure that every gloo connection of a new group leads to its rank. Collective over the group.

    ``RankError`` names the ranks whose connections were taken by another program, or says that not all have proven
    themselves within ``limit`` seconds. The secret is made of the key of the run's hosts, if there is one, and of a
    number in the store; where the store is open to others, so is that number.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or "cpu:gloo" not in dist.get_backend_config(group):
        return
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    store = PrefixStore(f"peers/{group.group_name}", _get_default_store())
    number = store.compare_set("secret", "", secrets.token_hex(PROOF_BYTES))
    secret = sign(read_rank_key(os.environ.get("LOCKSTEP_RUN_DIRECTORY", "")), number)

    def proofs(ends: Iterator[tuple[int, int]]) -> torch.Tensor:
        signed = b"".join(sign(secret, str(end).encode()) for end in ends)
        return torch.frombuffer(bytearray(signed), dtype=torch.uint8).view(ranks, PROOF_BYTES)

    received = torch.zeros(ranks, PROOF_BYTES, dtype=torch.uint8)
    sent = dist.all_to_all_single(received, proofs((me, peer) for peer in range(ranks)), group=group, async_op=True)
    begin = time.monotonic()
    try:
        sent.wait(timedelta(seconds=limit))
    except RuntimeError as error:
        if time.monotonic() < begin + limit:
            raise  # a rank has ended
        raise RankError(
            f"Rank {dist.get_rank()}: not every other rank has proven itself within {limit:g} s. {_ALONE}"
        ) from error
    differ = (received != proofs((peer, me) for peer in range(ranks))).any(1).nonzero().flatten().tolist()
    if differ:
        names = numbered("rank", [dist.get_global_rank(group, peer) for peer in differ])
        raise RankError(
            f"Rank {dist.get_rank()}: the connection that should lead to {names} does not. No gradients or "
            f"weights were sent over it. {_ALONE}"
        )


_ALONE = (
    "Another program of this host, or network, may have connected to a port of this run; give the run a network of its "
    "own (docs/hosts.md)."
)


def _choose_interface(world: World) -> None:
    """Sets the interface for the ranks' data unless the user has: loopback on one host, else that of the rendezvous."""
    if world.is_one_host:
        name = exact = LOOPBACK
        if os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK) == LOOPBACK:
            require_loopback(LOOPBACK)
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

    def __init__(self, mesh: Mesh, world: dist.ProcessGroup | None, axes: dict[str, dist.ProcessGroup]) -> None:
        self.mesh, self.world, self._axes = mesh, world, axes
        self.rank = dist.get_rank(world) if world is not None else 0

    @classmethod
    def open(cls, mesh: Mesh, world: dist.ProcessGroup | None, device: torch.device) -> Groups:
        """Makes the groups, and their communicators for tensors on ``device``: of the world first, then by axis.

        Collective: every rank of the world must call this, with the same mesh.

        ``ConfigError`` if the mesh does not take exactly the ranks of the world.
        """
        mesh.check_world(dist.get_world_size(world) if world is not None else 1)
        axes: dict[str, dist.ProcessGroup] = {}
        if world is not None:
            connect(world, device)
        for name, size in mesh.axes:
            if name in OF_DEVICES or size == 1 or world is None:
                continue
            if size == mesh.ranks:
                axes[name] = world
                continue
            axes[name] = _open_lines(mesh, name, world, device)
        return cls(mesh, world, axes)

    def another(self, axis: str, device: torch.device) -> dist.ProcessGroup:
        """One more group of this rank's line of an axis. Collective over the world."""
        assert self.world is not None
        return _open_lines(self.mesh, axis, self.world, device)

    def along(self, axis: str) -> dist.ProcessGroup | None:
        """Returns the group of the ranks that differ from this one only along ``axis``; None if there is no other."""
        return self._axes.get(axis)

    def line(self, axis: str) -> dist.ProcessGroup:
        """Returns the group along an axis of several ranks."""
        return self._axes[axis]

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis."""
        return 1 if axis in OF_DEVICES else self.mesh.size(axis)

    def coordinate(self, axis: str) -> int:
        """Returns the coordinate of this rank along an axis."""
        return self.mesh.coordinate(axis, self.rank)

    def release(self) -> None:
        """Drops the references to the groups."""
        self.world, self._axes = None, {}


def _open_lines(mesh: Mesh, axis: str, world: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group for each line of an axis, one after another; gives this rank's."""
    everyone, mine = dist.get_process_group_ranks(world), None
    for line in mesh.lines(axis):
        group = open_group([everyone[rank] for rank in line], device=device)
        mine = group if dist.get_rank(world) in line else mine
    assert mine is not None, "every rank is in one line"
    return mine
