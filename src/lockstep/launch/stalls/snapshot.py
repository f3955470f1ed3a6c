"""A snapshot of one rank, taken from outside: process state, heartbeat, stacks and collectives.

Stacks are parsed from faulthandler's dumps; their frames tell where a rank is and whether it waits for others.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cache

from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.stack_dump import Mark, mark_of, package_folder
from lockstep.runtime.torch_internals import FrameKind, kind_of_frame

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """As in ``train.py:12, in load``."""
        return f"{self.file}:{self.line}, in {self.function}"

    @property
    def is_library(self) -> bool:
        """True if it belongs to torch, Lockstep or Python, not to the user's own code."""
        return "/site-packages/" in self.file or self.file.startswith(_library_folders())

    @property
    def kind(self) -> FrameKind | Mark | None:
        """The meaning of the frame, if it is a marked function of Lockstep or a known one of torch."""
        return mark_of(self.function) or kind_of_frame(self.file, self.function)

    @property
    def operation(self) -> str:
        """The operation in which it waits for other ranks; empty if it does not."""
        kind = self.kind
        if kind is FrameKind.COLLECTIVE:
            return self.function.lstrip("_")
        return kind.operation if isinstance(kind, Mark) else ""


Stack = tuple[Frame, ...]
"""Frames, the innermost first."""


def main_stack(dump: str) -> Stack:
    """Returns the main thread's stack of a dump of all threads; empty if there is none."""
    stacks = _stacks(dump)
    for stack in stacks:
        if any(mark_of(frame.function) is Mark.RUNS_RANK for frame in stack):
            return stack
    return stacks[-1] if stacks else ()


def users_frame(stack: Stack) -> Frame | None:
    """Returns the innermost frame in the user's own code; else the innermost of all."""
    return next((frame for frame in stack if not frame.is_library), stack[0] if stack else None)


def waits_in(stack: Stack, *, collective_pending: bool) -> str:
    """Returns the operation in which a rank with this main stack waits for others, such as ``all_reduce``, or ""."""
    operation = ""
    for frame in stack:
        if frame.operation:
            operation = frame.operation
            continue
        # Wrappers of torch and waits of Python may lie between a wait and the innermost line.
        is_wait = frame.is_library and frame.function in ("wrapper", "wait")
        if operation or not (is_wait or frame.kind is FrameKind.WRAPPER):
            break
    if operation:
        return operation
    in_backward = stack and stack[0].kind is FrameKind.AUTOGRAD
    return "a collective in backward" if in_backward and collective_pending else ""


@cache
def _library_folders() -> tuple[str, ...]:
    """Prefixes of the paths of torch, Lockstep and Python."""
    folders = (package_folder("torch"), package_folder("lockstep"), sysconfig.get_path("stdlib"))
    return (*(f"{folder}/" for folder in folders), "<")


def _stacks(dump: str) -> list[Stack]:
    found: list[list[Frame]] = []
    for line in dump.splitlines():
        if _HEAD.match(line):
            found.append([])
        elif (match := _FRAME.match(line)) and found:
            found[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return [tuple(frames) for frames in found if frames]


_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
"""The beginnings of the names of collectives of which ranks may send and receive different amounts."""


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has issued."""

    sequence: int
    operation: str
    """As in ``gloo:all_reduce``."""
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    pending: bool

    @property
    def signature(self) -> tuple[object, ...]:
        """The part that must be equal on every rank: not the sizes of what a rank may send more of than another."""
        name = self.operation.rpartition(":")[2]
        return self.operation, () if name.startswith(_UNEVEN) else self.sizes, self.types

    @property
    def text(self) -> str:
        """As in ``#41 gloo:all_reduce [7] Float``."""
        sizes = " ".join(str(list(size)) for size in self.sizes)
        return f"#{self.sequence} {self.operation} {sizes} {' '.join(self.types)}".rstrip()


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """One rank at one moment."""

    rank: int
    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D cannot be interrupted, T is stopped, empty: gone."""
    beat: Beat
    silence: float
    """Seconds since its last heartbeat."""
    limit: float
    """Seconds of silence after which it counts as stalled."""
    stack: Stack = ()
    workers: tuple[Stack, ...] = ()
    """Stacks of the loader workers that it has forked and that are reading."""
    collectives: tuple[Collective, ...] = ()
    """The last collectives, the newest last."""

    @property
    def waits_in(self) -> str:
        """The operation in which it waits for others; empty if it does not."""
        pending = bool(self.collectives) and self.collectives[-1].pending
        return waits_in(self.stack, collective_pending=pending)

    @property
    def frame(self) -> Frame | None:
        """The current line of the user's code; that of a loader worker if the rank waits for one."""
        waits_for_worker = any(frame.kind is Mark.WAITS_FOR_WORKER for frame in self.stack[:12])
        for stack in self.workers if waits_for_worker else ():
            inner = users_frame(stack)
            if inner is not None and not inner.is_library:
                return inner
        return users_frame(self.stack)

    @property
    def is_overdue(self) -> bool:
        """True if it has been silent for too long."""
        return self.silence > self.limit
