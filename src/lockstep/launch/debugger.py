"""Lets a debugger join one rank, which waits for it, while nothing that the other ranks wait for has a limit.

    rank 1   start ── listens on 127.0.0.1 ── waits ── the debugger attaches ── the user's script ...
    others   start ── meet ........................................... wait for rank 1, however long it stands

debugpy serves the protocol from within the rank: no further process, and no socket but the one on loopback.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch.options import LaunchOptions
from lockstep.launch.place import Place
from lockstep.world import DEBUG_RANK, World

DEFAULT_PORT = 5678
"""The one that debuggers offer first."""
_HOST = "127.0.0.1"
_MOST_PORT = 65535


def with_debugger(
    options: LaunchOptions, rank: int, port: int = DEFAULT_PORT, place: Place | None = None
) -> LaunchOptions:
    """The options of a run in which ``rank`` waits for a debugger, no rank is hurried, and nothing starts again.

    Args:
        options: of this host.
        rank: of all hosts' ranks.
        port: on loopback of the host that has the rank.
        place: of this host among several.

    Raises:
        ConfigError: there is no such rank; or it is on this host, and debugpy is not installed or the port is taken.
    """
    count = options.devices.count
    check_rank_and_port(rank, count if place is None else place.world_size, port)
    first = 0 if place is None else place.first_rank
    if first <= rank < first + count:
        require_debugpy()
        _require_free(port)
    return dataclasses.replace(options, debug_rank=rank, debug_port=port, stall_limit=0.0, restarts=0)


def require_debugpy() -> None:
    """Raises ``ConfigError`` with the line that installs it where debugpy is missing."""
    if importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "A debugger on a rank was asked for, and debugpy is not installed in this environment. Install it with: "
            "pip install 'lockstep-train[debug]'."
        )


def check_rank_and_port(rank: int, ranks: int, port: int) -> None:
    """Raises ``ConfigError`` where a run of that many ranks has no such rank, or there is no such port."""
    if not 0 <= rank < ranks:
        has = f"the ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 alone"
        raise ConfigError(
            f"A debugger on rank {rank} was asked for, and the run has {has}. Choose one it has, or start more with "
            "--devices."
        )
    if not 0 <= port <= _MOST_PORT:
        raise ConfigError(
            f"The port {port} was asked for; ports are numbers from 1 to {_MOST_PORT}, or 0 for any free one."
        )


def take_part_in_debugging(world: World, rank: int, port: int) -> World:
    """The same for a world that another launcher has started. Every rank must call this, before the process group.

    Args:
        world: who this process is.
        rank: the one that waits here until a debugger has attached; the others wait for it without a limit.
        port: on loopback of that rank's host.

    Raises:
        ConfigError: there is no such rank; or it is this one, and debugpy is not installed or the port is taken.
    """
    check_rank_and_port(rank, world.world_size, port)
    os.environ[DEBUG_RANK] = str(rank)
    world = dataclasses.replace(world, is_debugged=True)
    importlib.import_module("torch.distributed")
    lift_default_limit(world)
    if world.rank == rank:
        require_debugpy()
        wait_for_debugger(rank, port)
    return world


def wait_for_debugger(rank: int, port: int) -> None:
    """Listens on loopback, says where, and returns when a debugger has attached and set its breakpoints.

    To be called on the rank that is debugged.
    """
    address = listen(rank, port)
    print(f"lockstep: rank {rank} waits for a debugger at {address}.", file=sys.stderr, flush=True)
    _debugpy().wait_for_client()


def listen(rank: int, port: int) -> str:
    """Serves debuggers in this process from now on, one at a time, and returns the address.

    The processes it starts, such as loader workers, are left alone.

    Args:
        rank: for the message.
        port: 0 takes any free one.
    """
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else it warns of frozen modules
    debugpy = _debugpy()
    _require_free(port)  # it would wait forever for a port that is taken
    debugpy.configure(subProcess=False)
    try:
        host, port = debugpy.listen((_HOST, port), in_process_debug_adapter=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"Rank {rank} cannot listen for a debugger on {_HOST}:{port}: {error}.") from error
    return f"{host}:{port}"


def _debugpy() -> Any:
    return importlib.import_module("debugpy")


def lift_default_limit(world: World) -> None:
    """Lets a script's own ``init_process_group()`` wait without a limit where a rank is debugged.

    torch has no public place for it, so nothing happens where the constant is not found.
    """
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    if world.is_debugged and hasattr(torch_groups, "default_pg_timeout"):
        limit = timedelta(seconds=world.patience(0.0))
        torch_groups.default_pg_timeout = limit  # type: ignore[union-attr]  # hasattr has seen it


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"The debugger's port {_HOST}:{port} cannot be had: {error.strerror}. Give another --debug-port; 0 "
                "takes any free one."
            ) from error
