"""Stack dumps of a rank, which a stuck rank writes too, and the marks in them: what a function waits for.

faulthandler's signal handler writes the stack without the help of Python, also while the rank waits in a collective or
holds the interpreter's lock. torch's own C++ server serves the last collectives, on a socket in the run directory that
only this user can access. Only its Flight Recorder is used: its stack handler can deadlock.

faulthandler writes a file, a line and the name of each frame's code. A marked function has its mark in that name, so
stacks and tracebacks show it, and their reader depends on no file and no function name:

    File ".../collectives.py", line 47 in gather_json [waits for an exchange between ranks]

A mark costs nothing at run time: the function is not wrapped.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lockstep.core.world import World

P = ParamSpec("P")
R = TypeVar("R")


class Mark(StrEnum):
    """The marks, as they are written in stacks: ASCII without brackets."""

    RUNS_RANK = "runs a rank"
    RUNS_TARGET = "runs the target"
    READS_SAMPLES = "reads samples"
    WAITS_FOR_WORKER = "waits for a loader worker"
    WAITS_FOR_GRADIENTS = "waits for the sum of gradients over ranks"
    WAITS_FOR_EXCHANGE = "waits for an exchange between ranks"
    WAITS_FOR_RENDEZVOUS = "waits for the rendezvous of ranks"

    @property
    def operation(self) -> str:
        """The operation in which a rank waits for other ranks; empty if the mark does not say that it does."""
        of_ranks = (Mark.WAITS_FOR_GRADIENTS, Mark.WAITS_FOR_EXCHANGE, Mark.WAITS_FOR_RENDEZVOUS)
        return self.removeprefix("waits for ") if self in of_ranks else ""


def stack_marker(mark: Mark) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function; the innermost decorator, because it changes the function's own code."""

    def add(function: Callable[P, R]) -> Callable[P, R]:
        marked: Any = function
        marked.__code__ = marked.__code__.replace(co_name=f"{marked.__code__.co_name} [{mark}]")
        return function

    return add


def mark_of(name: str) -> Mark | None:
    """Returns the mark in the name of a frame's code; None if it has none."""
    return next((mark for mark in Mark if name.endswith(f" [{mark}]")), None)


def has_mark(stack: str, mark: Mark) -> bool:
    """True if a stack, as faulthandler wrote it, has a frame with this mark."""
    return any(line.endswith(f" [{mark}]") for line in stack.splitlines())


_ESCAPED = re.compile(r"\\x[89a-f][0-9a-f]|\\u(?!d[89a-f])[0-9a-f]{4}|\\U00(?:0[1-9a-f]|10)[0-9a-f]{4}")
"""A character outside ASCII, as faulthandler writes it: ö as ``\\xf6``. Bytes that are no character stay escaped."""


def unescaped(dump: str) -> str:
    """Returns what faulthandler wrote with the paths and names as they are."""
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), dump)


@cache
def package_folder(name: str) -> Path:
    """Returns the folder of a package without importing it; ``ModuleNotFoundError`` if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"The package {name!r} is not installed.", name=name)
    return Path(spec.submodule_search_locations[0])


DUMP_SIGNAL = signal.SIGURG
"""Asks for a stack dump. Ignored by default, so it does not harm a process without a handler."""

_kept: list[Any] = []
"""Objects that must live as long as the process."""


def stack_file(directory: Path, rank: int) -> Path:
    """Returns the file to which a rank and its forked processes write their stacks."""
    return directory / f"stacks-{rank:03}"


def recorder_socket(directory: Path, rank: int) -> Path:
    """Returns the socket of a rank's Flight Recorder."""
    return directory / f"recorder-{rank:03}"


def serve_stack_dumps(world: World) -> None:
    """Installs the handler and the server in this process; does nothing if another launcher started it."""
    if not world.run_directory:
        return
    directory = Path(world.run_directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(stack_file(directory, world.rank), flags, 0o600)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
    _kept.append(file)
    distributed = sys.modules.get("torch.distributed")
    if world.world_size > 1 and distributed is not None and distributed.is_available():
        _serve_recorder(recorder_socket(directory, world.rank))


def _serve_recorder(path: Path) -> None:
    """Starts torch's server, if this version has it and the path is short enough for a socket (107 bytes).

    Without it, only the stacks explain a stall.
    """
    try:
        from torch._C._distributed_c10d import _WorkerServer  # not public
    except ImportError:
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nothing, suppress(RuntimeError):
            os.dup2(nothing.fileno(), 2)  # it announces itself as a warning
            _kept.append(_WorkerServer(str(path)))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
