"""What code tells of variables: which of them it reads before it sets them."""

from __future__ import annotations

import dis
import functools
from bisect import bisect_right
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any


def globals_of(code: CodeType, space: Mapping[str, Any]) -> set[str]:
    """The globals that code names, and the user's functions of the same module that it names, and so on."""
    found: set[str] = set()
    todo = [code]
    while todo:
        each = todo.pop()
        todo += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        new = {name for name in each.co_names if name in space} - found
        found |= new
        functions = [space[name] for name in new if type(space[name]) is FunctionType]
        todo += [function.__code__ for function in functions if function.__globals__ is space]
    return found


def live_names(code: CodeType, offset: int) -> frozenset[str]:
    """The variables that code may read after an instruction before it sets them: those that are live there.

    Variables that inner functions set count as live. Exceptions are not followed.

    Args:
        code: of a function or a module.
        offset: of the instruction, or of a cache behind it, in bytes, as ``frame.f_lasti``.
    """
    offsets, after = _live_after(code)
    return after[bisect_right(offsets, offset) - 1] | _set_by_inner(code)


@functools.cache
def _live_after(code: CodeType) -> tuple[list[int], list[frozenset[str]]]:
    """The offset of each instruction, and the names that are live after it (backward data flow; Kildall 1973)."""
    instructions = list(dis.get_instructions(code))
    place = {each.offset: number for number, each in enumerate(instructions)}
    follow: list[list[int]] = []
    for number, each in enumerate(instructions):
        targets = [place[each.argval]] if each.opcode in _JUMPS and each.argval in place else []
        if number + 1 < len(instructions) and each.opname not in _NEVER_CONTINUE:
            targets.append(number + 1)
        follow.append(targets)
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    after = list(before)
    changed = True
    while changed:
        changed = False
        for number in range(len(instructions) - 1, -1, -1):
            live = frozenset[str]().union(*(before[each] for each in follow[number]))
            after[number] = live
            for kind, name in reversed(_accesses(instructions[number])):
                live = live | {name} if kind == "LOAD" else live - {name}
            changed |= live != before[number]
            before[number] = live
    return [each.offset for each in instructions], after


_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_NEVER_CONTINUE = (
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
)
_OF_VARIABLES = ("FAST", "NAME", "DEREF", "GLOBAL", "CLOSURE")


def _accesses(instruction: dis.Instruction) -> list[tuple[str, str]]:
    """Each ("LOAD" or other, variable) of an instruction, which since Python 3.13 may name two, in their order."""
    words = instruction.opname.split("_")
    if not any(word in _OF_VARIABLES for word in words):
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    kinds = [word for word in words if word in ("LOAD", "STORE", "DELETE")]
    return [(kind, str(name)) for kind, name in zip(kinds, names)]


@functools.cache
def _set_by_inner(code: CodeType) -> frozenset[str]:
    """The variables that functions inside of this one set, as ``nonlocal`` or ``global``."""
    found: set[str] = set()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for each in dis.get_instructions(inner):
                if each.opname in ("STORE_DEREF", "STORE_GLOBAL"):
                    found.add(str(each.argval))
            found |= _set_by_inner(inner)
    return frozenset(found)
