"""The rendezvous of the ranks of a world: a store in a file, or on a socket bound to one interface."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import _rendezvous_handlers

from lockstep.core.world import World
from lockstep.errors import ConfigError, RankError
from lockstep.runtime.stack_dump import Mark, stack_marker

_DEFAULT_TIMEOUT = timedelta(minutes=5)
_CONNECT_LIMIT, _PAUSE = 5.0, 0.1


@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def open_store(world: World, limit: float) -> Store:
    """Opens the store named by ``world.rendezvous``, in at most ``limit`` seconds.

    Rank 0 serves a ``tcp://`` or ``env://`` store unless an agent does.
    """
    scheme, _, place = world.rendezvous.partition("://")
    if scheme == "file" and place:
        return PrefixStore("lockstep", FileStore(place, world.world_size))
    if scheme == "tcp":
        host, port = _host_and_port(world.rendezvous)
        return PrefixStore("lockstep", _tcp_store(host, port, world, limit, served=False))
    if scheme == "env":
        host, port = _from_environment()
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"lockstep/{attempt}", _tcp_store(host, port, world, limit, served=served))
    raise ConfigError(f"The rendezvous {world.rendezvous!r} is not known. Use file://PATH, tcp://HOST:PORT or env://.")


def meeting_address(world: World) -> tuple[str, int] | None:
    """Returns host and port of the store; None if it is a file."""
    scheme = world.rendezvous.partition("://")[0]
    if scheme == "tcp":
        return _host_and_port(world.rendezvous)
    return _from_environment() if scheme == "env" else None


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise ConfigError(f"The rendezvous {address!r} needs a host and a port, as in tcp://10.0.0.1:29500.")
    return parts.hostname, port


def _from_environment() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ConfigError(
            f"The environment names ranks but no rendezvous: MASTER_ADDR is {host!r} and MASTER_PORT is "
            f"{port!r}. Set both to the address of rank 0 (mpirun: -x MASTER_ADDR=...), give --rendezvous "
            "tcp://HOST:PORT, or start with `lockstep run` or torchrun. If no launcher is at work here, unset the "
            "variables that name a rank (RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK)."
        )
    return host, int(port)


_NO_SUCH_NAME = "Set MASTER_ADDR, or --rendezvous tcp://HOST:PORT, to an address of rank 0's host that all ranks know."


@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def _tcp_store(host: str, port: int, world: World, limit: float, *, served: bool) -> Store:
    serve = world.rank == 0 and not served
    listener = _listen(host, port) if serve else None
    end = time.monotonic() + limit
    try:
        if not serve:
            _wait_until_reachable(host, port, end)
        return TCPStore(
            host,
            port,
            None,
            serve,
            timedelta(seconds=max(1.0, end - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = (getattr(error, "strerror", None) or str(error).splitlines()[0]).rstrip(".")
        unknown = isinstance(error, socket.gaierror)
        check = _NO_SUCH_NAME if unknown else "Check that rank 0 runs there and that its port is reachable."
        raise RankError(
            f"Rank {world.rank} could not connect to the store at {host}:{port} within {limit:g} s: {reason}. {check}"
            f"{of_an_earlier_program(world)}"
        ) from error


def _wait_until_reachable(host: str, port: int, end: float) -> None:
    """Waits until something listens there; ``OSError`` at the time ``end``. torch would wait twice as long as told."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_LIMIT).close()
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE)
        else:
            return


def of_an_earlier_program(world: World) -> str:
    """A sentence on variables that may be left in the shell, if nothing else says that there are several ranks."""
    if world.run_directory or world.launcher != "lockstep":
        return ""
    return (
        f" The environment says that this is rank {world.rank} of {world.world_size}: if an earlier program has left "
        "that in your shell, unset RANK and WORLD_SIZE."
    )


def _listen(host: str, port: int) -> socket.socket:
    """Binds only to the interface of ``host``; torch by itself would listen on all of them."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"The rendezvous host {host!r} cannot be resolved on rank 0: {error.strerror}. {_NO_SUCH_NAME}"
        ) from error
    try:
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"Rank 0 cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Another run may use the port, or "
            "the address may belong to another host; choose a free port on this host."
        ) from error


def register_env_rendezvous(world: World) -> None:
    """Makes ``init_process_group()`` without arguments use ``world.rendezvous``.

    A script written for torchrun then needs no port under Lockstep's launcher, and listens on no additional interface.
    It may open one group after another: each has keys of its own in the store, which is kept.
    """
    scheme, _, _ = world.rendezvous.partition("://")
    if scheme not in ("file", "tcp"):
        return

    def meet(url: str, **settings: Any) -> Iterator[tuple[Store, int, int]]:
        if not stores:
            stores.append(open_store(world, settings.get("timeout", _DEFAULT_TIMEOUT).total_seconds()))
        try:
            yield PrefixStore(f"script/{len(kept)}", stores[0]), world.rank, world.world_size
        finally:  # at the end of init_process_group
            kept.append(dist.group.WORLD)

    # Gloo's destructor waits for a thread, and that one for Python's lock, which a script that drops its group holds.
    kept: list[object] = []
    stores: list[Store] = []
    _rendezvous_handlers["env"] = meet


@stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
def wait_for_all(limit: float) -> None:
    """Waits in the open group's store for every rank, at most ``limit`` seconds. Collective."""
    store = PrefixStore("leaving", _get_default_store())
    store.set(str(dist.get_rank()), "here")
    store.wait([str(rank) for rank in range(dist.get_world_size())], timedelta(seconds=limit))
