"""Analyses the bytecode of the user's code: which variables it reads before it sets them, and what it changes.

beta = 0.1 * step          sets beta
data.labels[7] = 1         changes labels
queue.append(x)            changes queue, as x.add_(y) changes x
backward(batch, loss)      reads what the function loss reads
data.scale *= 0.5          sets scale from what it was
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lockstep.core.users_code import codes_in, is_users_module, methods_of, names_loaded, users_frames


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
        is_set |= {*code.co_freevars} & _set_by(code) - live
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


def _set_by(code: CodeType) -> set[str]:
    return {name for each in _effects(code) for name in each.changes | each.own}


def _read(code: CodeType) -> tuple[list[dis.Instruction], list[_Accesses]]:
    """The instructions, and what each accesses, without the variables of comprehensions."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    accesses = [_accesses(each) for each in instructions]
    for number, each in enumerate(instructions):
        if each.opname == "LOAD_FAST_AND_CLEAR":
            _hide(each.argval, number, instructions, accesses)
    return instructions, accesses


@functools.cache
def _flow(code: CodeType) -> tuple[list[dis.Instruction], list[list[int]], list[_Accesses]]:
    """The instructions, the numbers of those that may follow each, and what each accesses: a control-flow graph."""
    instructions, accesses = _read(code)
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


def _hide(name: str, begin: int, instructions: list[dis.Instruction], accesses: list[_Accesses]) -> None:
    """Removes accesses to a comprehension's variable, up to the one that restores the function's variable of this name.

    Since Python 3.12 a comprehension is a part of the code around it.
    """
    ends = next((each.argval for each in instructions[begin:] if each.opname == "FOR_ITER"), None)
    if ends is None:  # an asynchronous one
        return
    for number in range(begin, len(instructions)):
        own = [each for each in accesses[number] if each[1] == name]
        is_last = instructions[number].offset >= ends and any(kind == "STORE" for kind, _ in own)
        for each in own[: 1 if is_last else None]:
            accesses[number].remove(each)
        if is_last:
            return


def _number_at(code: CodeType, offset: int) -> int:
    """The number of the instruction at an offset, or of the one that a cache entry there belongs to."""
    return bisect_right(_flow(code)[0], offset, key=lambda each: each.offset) - 1


def names_ahead(code: CodeType, offset: int) -> set[str]:
    """The variables that code may read or set after an instruction; see ``live_names``."""
    accesses = _flow(code)[2]
    return {name for each in _ahead(code, offset) for _, name in accesses[each]}


def _ahead(code: CodeType, offset: int) -> set[int]:
    """The numbers of the instructions that may run after one."""
    return _reached(_flow(code)[1], _number_at(code, offset))


def _read_by_others(code: CodeType, offsets: Sequence[int]) -> frozenset[str]:
    """The variables read by inner functions that others may call at any time: passed on before the loops around.

    What a loop passes on in each pass, such as a loss, is read there.

    Args:
        offsets: of the instruction, and of those that begin loops which make further passes.
    """
    given = [each for each in _given_away(code) if _flow(code)[0][each[0]].offset <= offsets[0]]
    ahead = set[int]().union(*(_ahead(code, each) for each in offsets if given))
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


def _live_before(accesses: _Accesses, live: frozenset[str], inner: _Reads) -> frozenset[str]:
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
        if names := [name for kind, name in _accesses(later) if kind == "STORE"]:
            is_decorated = names[0] == instructions[number].argval.co_name
            return names[0] if not calls or is_decorated else None  # it is what a call gave
    return None


@functools.cache
def _read_by(code: CodeType) -> frozenset[str]:
    """The variables of the functions around, and the globals, that code reads."""
    found = {
        name
        for each in dis.get_instructions(code)
        for kind, name in _accesses(each)
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
_OF_VARIABLES = ("FAST", "NAME", "DEREF", "GLOBAL", "CLOSURE")
_Accesses = list[tuple[str, str]]
_Reads = Mapping[str, frozenset[str]]
Places = Mapping[CodeType, Collection[int]]
"""Offsets of instructions, by code."""


def _accesses(instruction: dis.Instruction) -> _Accesses:
    """The variables of an instruction with "LOAD", "STORE" or "DELETE", in order: two since Python 3.13."""
    words = instruction.opname.split("_")
    if not any(word in _OF_VARIABLES for word in words):
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    kinds = [word for word in words if word in ("LOAD", "STORE", "DELETE")]
    return [(kind, str(name)) for kind, name in zip(kinds, names)]


@functools.cache
def _set_by_inner(code: CodeType) -> frozenset[str]:
    """The variables that inner functions set, as ``nonlocal`` or ``global``."""
    _, *inner = codes_in(code)
    return frozenset[str]().union(*(names_loaded(each, "STORE_DEREF", "STORE_GLOBAL") for each in inner))


class Carried(NamedTuple):
    """A name whose new value depends on the value before, as in ``total += x``."""

    name: str
    what: Literal["value", "own", "attribute", "object", "entries"] = "value"
    """The ``value`` of a variable, attribute or entry; that of the function's ``own`` variable; another object in place
    of the one in an ``attribute`` or a variable (``object``); more ``entries`` in a container."""


class _Effects(NamedTuple):
    """The effect of one instruction."""

    offset: int
    changes: frozenset[str]
    own: frozenset[str]
    """The variables of the function itself that it sets."""
    carries: frozenset[Carried]
    """Those of ``changes`` whose new value depends on the value before."""
    own_carries: frozenset[Carried]
    """Those of ``own``."""
    calls: frozenset[str]
    """The names of functions."""
    inner: CodeType | None
    sets: bool
    """True where it replaces ``changes`` as a whole, rather than parts of them."""


_Parts = Iterable[tuple[CodeType, float, float]]
"""Code, and the two offsets between which it runs, the second included."""
_Functions = Mapping[str, Collection[CodeType]]
"""Functions that code may call, by name."""


def changed_names(parts: _Parts, functions: _Functions, *, of_functions: bool = False) -> set[str]:
    """The names of variables, attributes and entries that code may set, or change in place.

    Local variables of ``functions`` are not among them, nor those of ``parts`` with ``of_functions``.
    """
    found = set[str]()
    for each, is_running in _effects_of(parts, functions, of_functions=of_functions):
        found |= each.changes | (each.own if is_running else set())
    return found


def carried_names(parts: _Parts, functions: _Functions) -> set[Carried]:
    """Those of ``changed_names`` whose new values depend on the values before."""
    found, anew = set[Carried](), set[str]()
    for each, is_running in _effects_of(parts, functions):
        found |= each.carries | (each.own_carries if is_running else set())
        anew |= {name for name in each.changes if each.sets and Carried(name) not in each.carries}
    return {each for each in found if each.what == "own" or each.name not in anew}


def _effects_of(parts: _Parts, functions: _Functions, *, of_functions: bool = False) -> Iterator[tuple[_Effects, bool]]:
    """The effects of code and of the functions that it calls; True where local variables of that code count."""
    parts = list(parts)
    running = set() if of_functions else {code for code, _, _ in parts}
    named, todo = {"__call__"}, [*parts, *((each, -1, _ALL) for each in functions.get("__call__", ()))]
    while todo:
        code, first, last = todo.pop()
        for each in _effects(code):
            if first < each.offset <= last:
                yield each, code in running
                todo += [(each.inner, -1, _ALL)] if each.inner else []
                called = [own for name in each.calls - named for own in functions.get(name, ())]
                todo += [(own, -1, _ALL) for own in called]
                named |= each.calls


@functools.cache
def _effects(code: CodeType) -> list[_Effects]:
    reader = _EffectsReader(sets_by_name=not _BY_NAME.isdisjoint(code.co_names))
    return list(map(reader.read, *_read(code)))


class _EffectsReader:
    """Finds the effects of instructions, read in order: an instruction changes what those before it have loaded."""

    def __init__(self, *, sets_by_name: bool) -> None:
        self._sets_by_name = sets_by_name
        """True for code that may set attributes whose names are strings in it."""
        self._loads: _Loads = defaultdict(list)
        self._texts: list[tuple[dis.Positions | None, str]] = []
        """Strings in the code, and their positions."""
        self._seen: set[tuple[int | None, str, frozenset[str]]] = set()
        """Names that were read: the line, and the variables of which each is an attribute."""
        self._is_in_place = False
        """True after ``+=`` and the like."""

    def read(self, each: dis.Instruction, shown: _Accesses) -> _Effects:
        where, kind, accesses = each.positions, each.opname, _accesses(each)
        line = where and where.lineno
        base = frozenset(() if accesses else _base_names(where, self._loads))
        known = base if where and where.col_offset is not None else frozenset[str]()
        names = {each.argval} if kind in _LOADS_ATTRIBUTE else set()
        changes, own = self._changes(each, base), set[str]()
        for place, (access, name) in enumerate(accesses):
            if access != "LOAD":
                (own if "FAST" in kind else changes).update({name} if (access, name) in shown else ())
            elif place:  # of two variables the positions are those of the first
                self._loads[line, None].append((dis.Positions(line), name))
            else:
                names.add(name)
        effects = _Effects(
            each.offset,
            changes=frozenset(changes),
            own=frozenset(own),
            carries=frozenset(self._carried(each, base, known, changes)),
            own_carries=frozenset(
                Carried(name, "own") for name in own if self._is_in_place or (line, name, known) in self._seen
            ),
            calls=base if kind.startswith("CALL") else frozenset(),
            inner=each.argval if isinstance(each.argval, CodeType) else None,
            sets=kind in _SETS or (kind in _LOADS_ATTRIBUTE and each.argval in _SETTING),
        )
        if where:
            self._loads[where[::2]] += [(where, name) for name in names]
        read = {name for access, name in shown if access == "LOAD"} if accesses else names
        self._seen |= {(line, name, known) for name in read}
        if kind == "LOAD_CONST" and isinstance(each.argval, str):
            self._texts.append((where, each.argval))
        if kind != "SWAP":
            self._is_in_place = kind == "BINARY_OP" and each.argrepr.endswith("=")
        return effects

    def _changes(self, each: dis.Instruction, base: Collection[str]) -> set[str]:
        """The names that an instruction changes: ``base``, the variable that it acts on, attributes, keys."""
        where, kind = each.positions, each.opname
        if kind in _LOADS_ATTRIBUTE:
            is_in_place = each.argval[-1] == "_" and each.argval[-2:] != "__"
            return {*base} if is_in_place or each.argval in _CHANGING else set()
        if kind in ("STORE_ATTR", "DELETE_ATTR"):
            return {each.argval, *(base if each.argval in ("data", "value") else ())}
        if kind in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"):
            is_line = where and (where.lineno, None)
            keys = [text for at, text in self._texts if _is_within(at, where) or (at and at[::2] == is_line)]
            return {*base, *keys}
        if kind == "LOAD_CONST" and isinstance(each.argval, str) and self._sets_by_name:
            return {each.argval}
        return _argument_of_next(where, self._loads) if where and kind.startswith("CALL") and "next" in base else set()

    def _carried(
        self, each: dis.Instruction, base: Collection[str], known: frozenset[str], changes: Collection[str]
    ) -> set[Carried]:
        """Those of the changes that depend on the value before."""
        kind, line = each.opname, each.positions and each.positions.lineno
        if kind.startswith("CALL"):
            return {*map(Carried, changes)}
        if kind in _LOADS_ATTRIBUTE and each.argval not in _SETTING:
            may_grow = each.argval in ("setdefault", "update")
            return {Carried(name, "entries" if may_grow else "value") for name in changes}
        if kind in _SETS:
            found = {name for name in changes if self._is_in_place or (line, name, known) in self._seen}
            replaced = {Carried(name, "attribute" if kind == "STORE_ATTR" else "object") for name in found}
            return {*map(Carried, found)} | replaced
        if kind == "STORE_SUBSCR":
            on_line = [text for at, text in self._texts if at and at.lineno == line]
            found = {name for name in changes if self._is_in_place or on_line.count(name) > 1}
            return {*map(Carried, found)} | {Carried(name, "entries") for name in {*base} - found}
        return set()


_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_SETS = ("STORE_ATTR", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_Loads = defaultdict[tuple[int | None, int | None], list[tuple[dis.Positions, str]]]
"""The names that instructions load and their positions, by the line and column where they begin. Only the line is known
of the second name that an instruction loads, and of all names with PYTHONNODEBUGRANGES."""


def _base_names(where: dis.Positions | None, loads: _Loads) -> set[str]:
    """The name ``x`` in ``x[...]``, ``x.method`` and ``x(...)``: the longest one that begins where they do."""
    if not where:
        return set()
    own = [(at, name) for at, name in loads[where[::2]] if _is_within(at, where)]
    longest = max(((at[1], at[3]) for at, _ in own), default=None)
    found = {name for at, name in own if (at[1], at[3]) == longest}
    return found or {name for _, name in loads[where[0], None]}


def _argument_of_next(where: dis.Positions, loads: _Loads) -> set[str]:
    """The name ``x`` in ``next(x)``."""
    every = itertools.chain.from_iterable(loads.values())
    own = [(at, name) for at, name in every if _is_within(at, where) and at[::2] != where[::2]]
    first = set([name for at, name in own if at[::2] == own[0][0][::2]][-1:])
    return first or {name for _, name in loads[where[0], None]}


def _is_within(inner: dis.Positions | None, outer: dis.Positions | None) -> bool:
    if inner is None or outer is None or None in (*inner, *outer):
        return False
    begins = (outer[0], outer[2]) <= (inner[0], inner[2])
    return begins and (inner[1], inner[3]) <= (outer[1], outer[3]) and inner != outer


_ALL = float("inf")
_BY_NAME = frozenset(("setattr", "__setattr__", "__dict__", "vars", "update"))
_CHANGING = frozenset(
    """
    add append appendleft extend extendleft fill insert put setdefault update
    clear discard pop popitem popleft remove load_state_dict move_to_end partition reverse rotate sort
    """.split()  # noqa: SIM905  a list of literals would be a line of its own for each
)
"""Methods that change their object in place; so do those whose names end in ``_``."""
_SETTING = ("clear", "copy_", "fill", "fill_", "load_state_dict", "zero_")
"""Methods that may replace all of their object, which then does not depend on the value before."""
CONSTRUCTORS = ("__init__", "__post_init__")


def functions_by_name(spaces: Iterable[Mapping[str, Any]]) -> dict[str, list[CodeType]]:
    """The code of the user's functions and methods by each name that leads to it; a class leads to its constructor."""
    found: dict[str, list[CodeType]] = defaultdict(list)
    seen: set[int] = set()
    todo = [pair for space in spaces for pair in list(space.items())]
    while todo:
        key, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType) and is_users_module(value.__module__ or ""):
            found[key].append(value.__code__)
            found[value.__name__].append(value.__code__)
            found[value.__code__.co_name].append(value.__code__)
        elif isinstance(value, ModuleType):
            todo += list(vars(value).items()) if is_users_module(value.__name__) else []
        elif not isinstance(value, type):
            todo.append(("", type(value)))
        elif is_users_module(value.__module__):
            for name, method in methods_of(value):
                found[name].append(method.__code__)
                if name in CONSTRUCTORS:
                    found[value.__name__].append(method.__code__)
    return found


@functools.cache
def changed_by_reading(kind: type) -> frozenset[str]:
    """The attributes that a data set of this class changes while samples are read, such as a cache."""
    functions: dict[str, list[CodeType]] = defaultdict(list)
    for name, method in methods_of(kind):
        functions[name].append(method.__code__)
    reading = [code for name in _READING for code in functions[name]]
    return frozenset(changed_names([(code, -1, _ALL) for code in reading], functions, of_functions=True))


_READING = ("__getitem__", "__getitems__", "__iter__", "__next__")


def read_in_loop(places: Iterable[str]) -> list[str]:
    """Those of the attributes and variables, in the words of a ``Snapshot``, that code of the user's frames names."""
    loads: set[tuple[str, str]] = set()
    for each in itertools.chain.from_iterable(dis.get_instructions(one.f_code) for one in users_frames()):
        loads |= {("variable", name) for kind, name in _accesses(each) if kind == "LOAD"}
        loads |= {("attribute", each.argval)} if each.opname in ("LOAD_ATTR", "LOAD_METHOD") else set()
    found = filter(None, map(_OF_PLACE.match, places))
    return [each.string for each in found if each.groups() in loads and not hasattr(Tensor, each[2])]


def unset_names(*, enters_loop: bool = False) -> list[str]:
    """The variables that the user's frames set and read next, and that have no value now; not what hooks read."""
    found = list[str]()
    for each, live in zip(frames := users_frames(), live_in(frames, enters_loop=enters_loop)):
        there = {*each.f_locals} | each.f_globals.keys() & {*each.f_code.co_names}
        found += sorted(live & _set_by(each.f_code) - there - _read_by_others(each.f_code, (each.f_lasti,)))
    return found


def read_after_loops(*, deeply: bool = False) -> set[str]:
    """The variables that loops of the user's frames change and the code after them reads; ``deeply``: all it reads."""
    found: set[str] = set()
    for code, place in [(each.f_code, each.f_lasti) for each in users_frames()]:
        instruction = _flow(code)[0][_number_at(code, place)]
        if instruction.opname == "FOR_ITER":
            after = _live_around(code)[0][_number_at(code, instruction.argval)]
            found |= after if deeply else after & changed_names([(code, instruction.offset, instruction.argval)], {})
    functions, todo = _functions_of_frames(users_frames()) if deeply else {}, [*found]
    while todo:  # what it names may be functions, which read globals
        codes = functions.get(todo.pop(), ())
        todo += {name for code in codes for name in names_loaded(code, "LOAD_GLOBAL")} - found
        found.update(todo)
    return found


def places_of_frames() -> Places:
    """Where the user's running frames are."""
    frames = users_frames()
    return {each.f_code: [one.f_lasti for one in frames if one.f_code is each.f_code] for each in frames}


def changed_since(offsets: Mapping[FrameType, int]) -> set[str]:
    """The names that the user's running frames may have changed since these ``offsets`` of instructions."""
    return changed_names(*_run_since(offsets))


def carried_since(offsets: Mapping[FrameType, int]) -> set[Carried]:
    """Those of ``changed_since`` whose new values depend on the values before."""
    return carried_names(*_run_since(offsets))


def _run_since(offsets: Mapping[FrameType, int]) -> tuple[_Parts, _Functions]:
    frames = users_frames()
    firsts = [offsets.get(each, -1) for each in frames]
    parts = [
        (each.f_code, first, each.f_lasti if first <= each.f_lasti else _ALL)  # else a loop has begun again
        for each, first in zip(frames, firsts)
    ]
    return parts, _functions_of_frames(frames)


def changed_by_loop() -> set[str]:
    """The names that the user's running frames, and the functions that their code names, may change.

    The functions are called there, or passed on, as a loss is. What constructors set is not among the names.
    """
    frames = users_frames()
    functions = _functions_of_frames(frames)
    for name in ("__call__", *CONSTRUCTORS):  # the first may be of a transform, which reading calls
        functions.pop(name, None)
    codes = [frame.f_code for frame in frames]
    named = {name for code in codes for name in code.co_names} | {"forward"}
    called = [code for name in named for code in functions.get(name, ()) if code.co_name not in CONSTRUCTORS]
    return changed_names([(code, -1, _ALL) for code in codes], functions) | changed_names(
        [(code, -1, _ALL) for code in called], functions, of_functions=True
    )


def _functions_of_frames(frames: Iterable[FrameType]) -> dict[str, list[CodeType]]:
    return functions_by_name([space for each in frames for space in (each.f_globals, each.f_locals)])
