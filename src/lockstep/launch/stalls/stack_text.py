"""Reads what faulthandler writes, and tells from it where a rank stands and whether it waits for others."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
_RANK_ENTRY = "lockstep/launch/rank.py"
_WAITING = {
    "torch/distributed/distributed_c10d.py": "",
    "torch/distributed/rendezvous.py": "the rendezvous of ranks",
    "lockstep/reduce/": "the sum of gradients over ranks",
    "lockstep/collectives.py": "an exchange between ranks",
    "lockstep/rendezvous.py": "the rendezvous of ranks",
    "lockstep/process_group.py": "the rendezvous of ranks",
}
"""Files in which an innermost frame means that the rank waits for others, and for what; empty: the function says."""
_ENGINE = ("torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/nn/parallel/")
"""Files from which torch waits for others in C++, if a collective is under way."""
_LIBRARIES = ("/torch/", "/lockstep/", "/site-packages/", sysconfig.get_path("stdlib") + "/", "<")


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
        """Whether it is in torch, in Lockstep or in Python, and not in the user's own code."""
        return any(part in self.file for part in _LIBRARIES)


Stack = tuple[Frame, ...]
"""Frames, the innermost first."""


def main_stack(dump: str) -> Stack:
    """The main thread's stack of one dump over all threads; empty if there is none."""
    stacks = _stacks(dump)
    for stack in stacks:
        if any(_RANK_ENTRY in frame.file for frame in stack):
            return stack
    return stacks[-1] if stacks else ()


def users_frame(stack: Stack) -> Frame | None:
    """The innermost frame in the user's own code; else the innermost of all."""
    return next((frame for frame in stack if not frame.is_library), stack[0] if stack else None)


def waits_in(stack: Stack, *, collective_pending: bool) -> str:
    """The operation in which a rank waits for others, such as ``all_reduce``; empty if it does not.

    Args:
        stack: the main thread's.
        collective_pending: whether the rank has issued a collective that has not ended.
    """
    operation = ""
    for frame in stack:
        name = next((name for part, name in _WAITING.items() if part in frame.file), None)
        if name is not None:
            operation = name or frame.function.lstrip("_")
        elif operation or not _passed_over(frame):
            break
    if operation:
        return operation
    if stack and collective_pending and any(part in stack[0].file for part in _ENGINE):
        return "a collective in backward"
    return ""


def _passed_over(frame: Frame) -> bool:
    """Frames that may lie between a wait and the innermost line: wrappers of torch and waits of Python."""
    return "torch/distributed/c10d_logger.py" in frame.file or frame.function in ("wrapper", "wait")


def _stacks(dump: str) -> list[Stack]:
    found: list[list[Frame]] = []
    for line in dump.splitlines():
        if _HEAD.match(line):
            found.append([])
        elif (match := _FRAME.match(line)) and found:
            found[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return [tuple(frames) for frames in found if frames]
