"""Live variables: which variables of the user's running functions their code may read before it sets them again.

beta = 0.1 * step          sets beta
loss = beta * error        reads beta
backward(batch, loss)      reads what the function loss reads

They follow from the bytecode, by a backward flow of data over its instructions.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, MappingProxyType

from torch import Tensor

from lockstep.core.users_code import codes_in, names_loaded, users_frames
from lockstep.run.changed_names import (
    Accesses,
    accesses_of,
    changed_names,
    functions_of_frames,
    instructions_of,
    set_by,
)


def live_names(code: CodeType, offset: int, *, enters_loop: bool = False) -> frozenset[str]:
    """The variables that are live after an instruction: code may read them before it sets them.

    Variables that an inner function sets count as live. What an inner function reads counts as read wherever the
    function is named. Exceptions are not followed.

    Args:
        offset: of the instruction, or of one of its cache entries, in bytes, as ``frame.f_lasti``.
        enters_loop: if the instruction gives the iterable of a ``for``, that loop makes a pass.
    """
    before, after = _live_around(code, offset if enters_loop else None)
    number = _number_at(code, offset)
    is_for = enters_loop and _flow(code)[0][number].opname == "FOR_ITER"
    return (before[number + 1] if is_for else after[number]) | _set_by_inner(code)


def live_in(
    frames: Sequence[FrameType],
    begun: Places = MappingProxyType({}),
    *,
    inside: Places = MappingProxyType({}),
    enters_loop: bool = False,
) -> list[frozenset[str]]:
    """The live names of running frames, the outermost first.

    While an inner function runs, what it sets before it reads it is not live in the functions around it. What it reads
    is live once the function was passed to others, as a hook is.

    Args:
        begun: where code has begun loops over steps. The loops around these go on, perhaps in a resumed run.
        inside: where it was given the first step of loops that go on, too.
        enters_loop: the innermost frame begins a loop and will make a pass, so what the body sets is not live.
    """
    found, is_set = list[frozenset[str]](), set[str]()
    for frame in reversed(frames):
        code, places = frame.f_code, begun.get(frame.f_code, ())
        passes = [live_in_next_pass(code, each) for each in places]
        passes += [live_names(code, each) for each in inside.get(code, ())]
        passes.append(_read_by_others(code, (frame.f_lasti, *places)))
        live = live_names(code, frame.f_lasti, enters_loop=enters_loop and not found).union(*passes) - is_set
        is_set |= {*code.co_freevars} & set_by(code) - live
        is_set -= {*code.co_cellvars}
        found.append(live)
    return found[::-1]


@functools.cache
def live_in_next_pass(code: CodeType, offset: int) -> frozenset[str]:
    """The names that are live where the loops around an instruction begin another pass.

    A run that is resumed after ``run.save(); return`` in such a loop makes that pass, although no path leads to it from
    the ``return``. So the loops are recognised by the paths that lead back to ``offset``.
    """
    instructions, follow, accesses = _flow(code)
    before, _ = _live_around(code, offset)
    number, inner = _number_at(code, offset), _inner_functions(instructions)
    found, tests = frozenset[str](), set[int]()
    ahead = [(each, target) for each in _reached(follow, number) for target in follow[each]]
    for end, begin in sorted(ahead, reverse=True):  # the ends of a loop's body come last
        # "continue" leads to the test before the body, where what is read after the loop is live.
        if begin > min(end, number) or end not in _reached(follow, number, but=begin) or begin in tests:
            continue
        is_for = instructions[begin].opname == "FOR_ITER"
        live, test = before[begin + is_for], 0 if is_for else _length_of_test(instructions, begin, end)
        for each in range(end, end - test, -1):
            live = _live_before(accesses[each], live, inner)
        found |= live
        tests |= {begin - test} if test else set()
    return found


def _length_of_test(instructions: Sequence[dis.Instruction], begin: int, end: int) -> int:
    """The number of instructions in the test of a ``while``, which stands before its body and, copied, after it."""
    last = end - (instructions[end].opname in _NEVER_CONTINUE)
    pairs = zip(instructions[last - 1 :: -1], instructions[begin - 2 :: -1] if begin > 1 else ())
    keys = ([(each.positions, each.opcode in _JUMPS or each[:3]) for each in pair] for pair in pairs)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], keys))
    return count + 1 if count else 0


def _reached(follow: Sequence[Sequence[int]], number: int, but: int = -1) -> set[int]:
    """The numbers of the instructions that can be reached from this one without passing ``but``."""
    seen, todo = {but}, list(follow[number])
    while todo:
        if (number := todo.pop()) not in seen:
            seen.add(number)
            todo += follow[number]
    return seen - {-1}


@functools.cache
def _flow(code: CodeType) -> tuple[list[dis.Instruction], list[list[int]], list[Accesses]]:
    """The instructions, the numbers of those that may follow each, and what each accesses: a control-flow graph."""
    instructions, accesses = instructions_of(code)
    offsets = [each.offset for each in instructions]
    follow = list[list[int]]()
    for number, each in enumerate(instructions):  # a long jump leads to the EXTENDED_ARG of its target
        targets = [bisect_left(offsets, each.argval)] if each.opcode in _JUMPS else []
        if number + 1 < len(instructions) and each.opname not in _NEVER_CONTINUE:
            targets.append(number + 1)
        follow.append(targets)
        if isinstance(each.argval, CodeType) and _holder_of_inner(number, instructions) is None:
            accesses[number] += [("LOAD", name) for name in sorted(_read_by(each.argval))]
    return instructions, follow, accesses


def _number_at(code: CodeType, offset: int) -> int:
    """The number of the instruction at an offset, or of the one that a cache entry there belongs to."""
    return bisect_right(_flow(code)[0], offset, key=lambda each: each.offset) - 1


def names_ahead(code: CodeType, offset: int) -> set[str]:
    """The variables that code may read or set after an instruction; see ``live_names``."""
    _, follow, accesses = _flow(code)
    return {name for each in _reached(follow, _number_at(code, offset)) for _, name in accesses[each]}


def _read_by_others(code: CodeType, offsets: Sequence[int]) -> frozenset[str]:
    """The variables read by inner functions that others may call at any time: passed on before the loops around.

    What a loop passes on in each pass, such as a loss, is read there.

    Args:
        offsets: of the instruction, and of those that begin loops which make further passes.
    """
    instructions, follow, _ = _flow(code)
    given = [each for each in _given_away(code) if instructions[each[0]].offset <= offsets[0]]
    ahead = set[int]().union(*(_reached(follow, _number_at(code, each)) for each in offsets if given))
    return frozenset[str]().union(*(names for number, names in given if number not in ahead))


@functools.cache
def _given_away(code: CodeType) -> list[tuple[int, frozenset[str]]]:
    """The numbers of instructions that pass an inner function, or a class, to others; the variables that it reads."""
    instructions, _, accesses = _flow(code)
    inner, found = _inner_functions(instructions), list[tuple[int, frozenset[str]]]()
    opnames = ["", *(each.opname for each in instructions), ""]
    for number, each in enumerate(instructions):
        if isinstance(body := each.argval, CodeType):
            is_held = body.co_flags & CO_OPTIMIZED and _holder_of_inner(number, instructions)
            if not is_held and body.co_name not in _AT_ONCE:
                found.append((number, _read_by(body)))
        elif "PUSH_NULL" not in (opnames[number], opnames[number + 2]) and not _makes_closure(each, code):
            found += [(number, inner[name]) for kind, name in accesses[number] if kind == "LOAD" and name in inner]
    return [(number, names.union(*(inner.get(each, ()) for each in names))) for number, names in found]


def _makes_closure(instruction: dis.Instruction, code: CodeType) -> bool:
    """True where a variable itself is loaded, for an inner function, rather than its value."""
    is_cell = instruction.argval in (*code.co_cellvars, *code.co_freevars)
    return instruction.opname == "LOAD_CLOSURE" or (instruction.opname == "LOAD_FAST" and is_cell)


@functools.cache
def _live_around(code: CodeType, begun: int | None = None) -> tuple[list[frozenset[str]], list[frozenset[str]]]:
    """The names that are live before each instruction, and those after it, by backward data flow (Kildall 1973).

    The ``for`` whose iterable is made at ``begun`` makes a pass.
    """
    instructions, follow, accesses = _flow(code)
    inner = _inner_functions(instructions)
    if begun is not None:
        last = number = _number_at(code, begun)
        while instructions[number].opname != "FOR_ITER" and len(follow[number]) == 1:
            last, number = number, follow[number][0]
        if last != number and instructions[number].opname == "FOR_ITER":
            follow = [*follow[:last], [number + 1], *follow[last + 1 :]]
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    after = list(before)
    changed = True
    while changed:
        changed = False
        for number in range(len(instructions) - 1, -1, -1):
            live = frozenset[str]().union(*(before[each] for each in follow[number]))
            after[number] = live
            live = _live_before(accesses[number], live, inner)
            changed |= live != before[number]
            before[number] = live
    return before, after


def _live_before(accesses: Accesses, live: frozenset[str], inner: _Reads) -> frozenset[str]:
    """The names that are live before an instruction, given those after it."""
    for kind, name in reversed(accesses):
        live = live | {name} | inner.get(name, frozenset()) if kind == "LOAD" else live - {name}
    return live


def _inner_functions(instructions: list[dis.Instruction]) -> dict[str, frozenset[str]]:
    """By the variable that holds an inner function: the variables that it, and the inner functions it calls, read."""
    found: dict[str, frozenset[str]] = {}
    for number, each in enumerate(instructions):
        if isinstance(each.argval, CodeType) and (name := _holder_of_inner(number, instructions)):
            found[name] = found.get(name, frozenset()) | _read_by(each.argval)
    for _ in range(3):  # one calls another
        found = {name: reads.union(*(found.get(each, ()) for each in reads)) for name, reads in found.items()}
    return found


def _holder_of_inner(number: int, instructions: list[dis.Instruction]) -> str | None:
    """The variable to which the function is assigned whose code an instruction loads; None where it is used at once."""
    following = itertools.islice(instructions, number + 1, None)
    calls = 0
    for later in itertools.takewhile(lambda one: one.opname not in _ENDS, following):
        calls += later.opname.startswith("CALL")
        if names := [name for kind, name in accesses_of(later) if kind == "STORE"]:
            is_decorated = names[0] == instructions[number].argval.co_name
            return names[0] if not calls or is_decorated else None  # it is what a call gave
    return None


@functools.cache
def _read_by(code: CodeType) -> frozenset[str]:
    """The variables of the functions around, and the globals, that code reads."""
    found = {
        name
        for each in dis.get_instructions(code)
        for kind, name in accesses_of(each)
        if kind == "LOAD" and (name in code.co_freevars or name in code.co_names)
    }
    inner = [_read_by(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(found).union(*inner) - {*code.co_cellvars}


_OF_PLACE = re.compile(r"the (?:\w+ )?(attribute|variable) '(\w+)'")
_AT_ONCE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
_ENDS = ("POP_TOP", "STORE_ATTR", "RETURN_VALUE")
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_NEVER_CONTINUE = (
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
)
_Reads = Mapping[str, frozenset[str]]
Places = Mapping[CodeType, Collection[int]]
"""Offsets of instructions, by code."""


@functools.cache
def _set_by_inner(code: CodeType) -> frozenset[str]:
    """The variables that inner functions set, as ``nonlocal`` or ``global``."""
    _, *inner = codes_in(code)
    own = {*code.co_cellvars, *code.co_freevars}
    kept = [names_loaded(each, "STORE_DEREF") & own.intersection(each.co_freevars) for each in inner]
    return frozenset[str]().union(*kept, *(names_loaded(each, "STORE_GLOBAL") for each in inner))


def read_in_loop(places: Iterable[str]) -> list[str]:
    """Those of the attributes and variables, in the words of a ``Snapshot``, that code of the user's frames names."""
    found = [*filter(None, map(_OF_PLACE.match, places))]
    frames, loads = users_frames() if found else [], set[tuple[str, str]]()
    for each in itertools.chain.from_iterable(dis.get_instructions(one.f_code) for one in frames):
        loads |= {("variable", name) for kind, name in accesses_of(each) if kind == "LOAD"}
        loads |= {("attribute", each.argval)} if each.opname in ("LOAD_ATTR", "LOAD_METHOD") else set()
    return [each.string for each in found if each.groups() in loads and not hasattr(Tensor, each[2])]


def unset_names(*, enters_loop: bool = False) -> list[str]:
    """The variables that the user's frames set and read next, and that have no value now; not what hooks read."""
    found = list[str]()
    for each, live in zip(frames := users_frames(), live_in(frames, enters_loop=enters_loop)):
        there = {*each.f_locals} | each.f_globals.keys() & {*each.f_code.co_names}
        found += sorted(live & set_by(each.f_code) - there - _read_by_others(each.f_code, (each.f_lasti,)))
    return found


def _loops() -> list[tuple[CodeType, int, int, frozenset[str]]]:
    """The loops that the user's frames are at: the code, the offsets of begin and end, and what is live after them."""
    found = []
    for code, place in [(each.f_code, each.f_lasti) for each in users_frames()]:
        begin = _flow(code)[0][_number_at(code, place)]
        if begin.opname == "FOR_ITER":
            live = _live_around(code)[0][_number_at(code, begin.argval)]
            found.append((code, begin.offset, begin.argval, live))
    return found


def changed_and_read_after_loops() -> set[str]:
    """The variables that the loops of the user's frames set or change, and the code after those loops reads."""
    return {name for code, begin, end, live in _loops() for name in live & changed_names([(code, begin, end)], {})}


def read_after_loops() -> set[str]:
    """All that the code after the loops of the user's frames reads, and the functions that it names."""
    found = {name for *_, live in _loops() for name in live}
    functions, todo = functions_of_frames(users_frames()), [*found]
    while todo:
        codes = functions.get(todo.pop(), ())
        todo += {name for code in codes for name in names_loaded(code, "LOAD_GLOBAL")} - found
        found.update(todo)
    return found


def places_of_frames() -> Places:
    """Where the user's running frames are."""
    frames = users_frames()
    return {each.f_code: [one.f_lasti for one in frames if one.f_code is each.f_code] for each in frames}
