"""Attaches a debugger to one rank, at its start or while it runs; the other ranks wait for it without a time limit.

    rank 1   start ── listens on 127.0.0.1 ── waits ── the debugger attaches ── the user's script ...
    others   start ── rendezvous ..................................... wait for rank 1, however long it stands

debugpy serves the protocol from within the rank: no other process, and no socket but the one on loopback. A running
rank is asked by a signal. No process is traced or written to from outside, so this works where ptrace is forbidden, as
in most containers.

    lockstep debug --attach   request file, signal ────────────────> reads the answer file
    the rank                                  listens on loopback ──> writes the answer file
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

from lockstep.core.atomic import write_whole
from lockstep.core.world import DEBUG_RANK, HostLayout, World
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.options import LaunchOptions, single_host_layout
from lockstep.launch.runs import RunOnHost, signal_process

DEFAULT_PORT = 5678
"""The default of debuggers."""
_HOST = "127.0.0.1"
_MOST_PORT = 65535


def with_debugger(
    options: LaunchOptions, rank: int, port: int = DEFAULT_PORT, layout: HostLayout | None = None
) -> LaunchOptions:
    """Returns the options of a run in which ``rank`` waits for a debugger, without time limits and restarts.

    ``layout`` is that of this host among several. ``ConfigError`` if there is no such rank; or if it is on this host,
    and debugpy is not installed or the port is in use.
    """
    layout = layout or single_host_layout(options)
    check_rank_and_port(rank, layout.world_size, port)
    if layout.first_rank <= rank < layout.first_rank + options.devices.count:
        require_debugpy()
        _require_free(port)
    return dataclasses.replace(options, debug_rank=rank, debug_port=port, stall_limit=0.0, restarts=0)


def require_debugpy() -> None:
    """Raises ``ConfigError`` if debugpy is not installed."""
    if importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "A debugger on a rank was asked for, and debugpy is not installed in this environment. Install it with: "
            "pip install 'lockstep-train[debug]'."
        )


def check_rank_and_port(rank: int, ranks: int, port: int) -> None:
    """Raises ``ConfigError`` if a run of that many ranks has no such rank, or there is no such port."""
    if not 0 <= rank < ranks:
        has = f"the ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 alone"
        raise ConfigError(
            f"A debugger on rank {rank} was asked for, and the run has {has}. Choose one of them, or start more ranks "
            "with --devices."
        )
    if not 0 <= port <= _MOST_PORT:
        raise ConfigError(f"The port {port} was given; use a number from 1 to {_MOST_PORT}, or 0 for any free port.")


def take_part_in_debugging(world: World, rank: int, port: int) -> World:
    """Does the same in a world that another launcher has started. Every rank must call this, before the process group.

    ``rank`` waits here until a debugger has attached; the others wait for it without a time limit.
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
    """Listens on loopback, prints the address, and waits until a debugger has attached and set its breakpoints."""
    address = listen(rank, port)
    print(f"lockstep: rank {rank} waits for a debugger at {address}.", file=sys.stderr, flush=True)
    importlib.import_module("debugpy").wait_for_client()


def listen(rank: int, port: int) -> str:
    """Starts to serve debuggers in this process, one at a time, and returns the address; 0 is any free port.

    Child processes, such as loader workers, are not debugged.
    """
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # otherwise it warns about frozen modules
    debugpy = importlib.import_module("debugpy")
    _require_free(port)  # debugpy would wait forever for a port in use
    debugpy.configure(subProcess=False)
    try:
        host, port = debugpy.listen((_HOST, port), in_process_debug_adapter=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"Rank {rank} cannot listen for a debugger on {_HOST}:{port}: {error}.") from error
    return f"{host}:{port}"


def lift_default_limit(world: World) -> None:
    """Lets a script's own ``init_process_group()`` wait without a time limit if a rank is debugged.

    torch has no public setting for it, so nothing happens if the constant is not found.
    """
    torch_groups = sys.modules.get("torch.distributed.distributed_c10d")
    if world.is_debugged and hasattr(torch_groups, "default_pg_timeout"):
        limit = timedelta(seconds=world.patience(0.0))
        torch_groups.default_pg_timeout = limit  # type: ignore[union-attr]  # hasattr has seen it


def _require_free(port: int) -> None:
    try:
        socket.create_server((_HOST, port)).close()
    except OSError as error:
        raise ConfigError(
            f"Cannot bind the debugger's port {_HOST}:{port}: {os.strerror(error.errno or 0)}. Choose another "
            "--debug-port, or 0 for any free port."
        ) from error


REQUEST_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""Asks a rank to serve a debugger; 0 on systems without real-time signals."""
_DEBUGGED = "debugged"
_POLL_INTERVAL = 0.05


def serve_debug_requests(world: World) -> None:
    """Lets a debugger attach to this rank at any time; does nothing if another launcher started it.

    The rank answers between two lines of Python: one that waits in a collective answers when that returns.
    """
    if not world.run_directory or not REQUEST_SIGNAL:
        return
    request, answer_file = _files(Path(world.run_directory), world.rank)

    def answer(number: int, frame: FrameType | None) -> None:
        try:
            result = {"address": listen(world.rank, int(request.read_text()))}
        except LockstepError as error:
            result = {"refused": str(error)}
        write_whole(answer_file, json.dumps(result).encode())

    signal.signal(REQUEST_SIGNAL, answer)


def request_debugger(run: RunOnHost, rank: int, port: int, within: float) -> str:
    """Asks a rank to serve debuggers on a port of loopback, unless it does already, and returns the address.

    ``ConfigError`` if the rank is not running, does not answer ``within`` this number of seconds, or cannot listen.
    """
    request, answer = _files(run.directory, rank)
    if not answer.exists():
        beat = run.beats.get(rank)
        if beat is None or not REQUEST_SIGNAL:
            raise ConfigError(f"Cannot attach to rank {rank}: it has not started, or there is no such rank.")
        write_whole(request, str(port).encode())
        (run.directory / _DEBUGGED).touch(mode=0o600)  # before the rank can stop at a breakpoint
        if not signal_process(run, beat.pid, REQUEST_SIGNAL):
            (run.directory / _DEBUGGED).unlink()
            raise ConfigError(f"Cannot attach to rank {rank}: it has ended.")
        _wait_for(answer, rank, within)
    result = json.loads(answer.read_text())
    if "refused" in result:
        answer.unlink()
        raise ConfigError(result["refused"])
    return str(result["address"])


def is_debugged(directory: Path) -> bool:
    """True if a rank of the run was asked to serve a debugger."""
    return (directory / _DEBUGGED).exists()


def _wait_for(answer: Path, rank: int, within: float) -> None:
    deadline = time.monotonic() + within
    while not answer.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"Rank {rank} has not answered within {within:g} s. A rank that waits in a collective answers when "
                "that returns; 'lockstep stacks' shows where it is."
            )
        time.sleep(_POLL_INTERVAL)  # the rank cannot notify; it can only write


def _files(directory: Path, rank: int) -> tuple[Path, Path]:
    """Returns the request file and the answer file of a rank."""
    return directory / f"debugger-{rank:03}.ask", directory / f"debugger-{rank:03}.answer"
