"""The store in which the ranks of a world meet: a file, or a socket on one named interface."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from lockstep.errors import ConfigError, RankError
from lockstep.world import World


def open_store(world: World, limit: float) -> dist.Store:
    """Opens the store named by ``world.rendezvous``.

    Args:
        world: who this process is; rank 0 serves a ``tcp://`` or ``env://`` store unless an agent does.
        limit: seconds to reach the store.
    """
    scheme, _, place = world.rendezvous.partition("://")
    if scheme == "file" and place:
        return dist.PrefixStore("lockstep", dist.FileStore(place, world.world_size))
    if scheme == "tcp":
        host, port = _host_and_port(world.rendezvous)
        return dist.PrefixStore("lockstep", _tcp_store(host, port, world, limit, served=False))
    if scheme == "env":
        host, port = _from_environment()
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"lockstep/{attempt}", _tcp_store(host, port, world, limit, served=served))
    raise ConfigError(
        f"The rendezvous {world.rendezvous!r} is not known. Use file://PATH, tcp://HOST:PORT or env://."
    )


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
            f"The environment names ranks but no meeting place: MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}. "
            "Set both to the address of rank 0, or start with `lockstep run` or torchrun."
        )
    return host, int(port)


def _tcp_store(host: str, port: int, world: World, limit: float, *, served: bool) -> dist.Store:
    serve = world.rank == 0 and not served
    listener = _listen(host, port) if serve else None
    try:
        return dist.TCPStore(
            host,
            port,
            None,
            serve,
            timedelta(seconds=limit),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Rank {world.rank} could not reach the store at {host}:{port} within {limit:g} s: "
            f"{str(error).splitlines()[0]}. Check that rank 0 runs there and that the port is open between the hosts."
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    """Binds to the interface of ``host`` alone; torch by itself would listen on all of them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"The rendezvous host {host!r} cannot be resolved on rank 0: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Rank 0 cannot listen on {host}:{port}: {error.strerror}. Another run may use the port, or the address may "
            "belong to another host; choose a free port on this host."
        ) from error
    return listener
