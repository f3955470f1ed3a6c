"""A rank's side of being asked where it stands: answers come without the help of Python, so a stuck rank answers too.

The stack is written by faulthandler's signal handler, also while the rank waits in a collective or holds the
interpreter's lock. What the process groups have done last is served by torch's own C++ server, on a socket in the run
directory that only this user can enter. Only its Flight Recorder is ever asked: its stack handler can deadlock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.world import World

ASK = signal.SIGURG
"""Asks for the stack. Ignored by default, so a process that does not know it comes to no harm."""

_kept: list[Any] = []
"""What must live as long as the process."""


def stack_file(directory: Path, rank: int) -> Path:
    """Where a rank and the processes it forks write their stacks."""
    return directory / f"stacks-{rank:03}"


def recorder_socket(directory: Path, rank: int) -> Path:
    """Where a rank's Flight Recorder answers."""
    return directory / f"recorder-{rank:03}"


def answer_from_now_on(world: World) -> None:
    """Makes this process answer for as long as it lives; nothing where Lockstep's launcher did not start it."""
    if not world.run_directory:
        return
    directory = Path(world.run_directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(stack_file(directory, world.rank), flags, 0o600)
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)
    _kept.append(file)
    distributed = sys.modules.get("torch.distributed")
    if world.world_size > 1 and distributed is not None and distributed.is_available():
        _serve_recorder(recorder_socket(directory, world.rank))


def _serve_recorder(path: Path) -> None:
    """Starts torch's server, where this version has it and the path is short enough for a socket (107 bytes).

    Without it stacks alone have to explain a stall.
    """
    try:
        from torch._C._distributed_c10d import _WorkerServer  # not public
    except ImportError:
        return
    with suppress(RuntimeError), _silent_stderr():  # it announces itself as a warning
        _kept.append(_WorkerServer(str(path)))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
