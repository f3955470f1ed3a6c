"""The variables, attributes and entries that the bytecode of the user's code sets, or changes in place.

data.labels[7] = 1         changes labels
queue.append(x)            changes queue, as x.add_(y) changes x
data.scale *= 0.5          sets scale from what it was
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from lockstep.core.users_code import is_users_module, methods_of, users_frames


def instructions_of(code: CodeType) -> tuple[list[dis.Instruction], list[Accesses]]:
    """The instructions, and what each accesses, without the variables of comprehensions."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    accesses = [accesses_of(each) for each in instructions]
    for number, each in enumerate(instructions):
        if each.opname == "LOAD_FAST_AND_CLEAR":
            _hide(each.argval, number, instructions, accesses)
    return instructions, accesses


def _hide(name: str, begin: int, instructions: list[dis.Instruction], accesses: list[Accesses]) -> None:
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


_OF_VARIABLES = ("FAST", "NAME", "DEREF", "GLOBAL", "CLOSURE")
Accesses = list[tuple[str, str]]


def accesses_of(instruction: dis.Instruction) -> Accesses:
    """The variables of an instruction with "LOAD", "STORE" or "DELETE", in order: two since Python 3.13."""
    words = instruction.opname.split("_")
    if not any(word in _OF_VARIABLES for word in words):
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    kinds = [word for word in words if word in ("LOAD", "STORE", "DELETE")]
    return [(kind, str(name)) for kind, name in zip(kinds, names)]


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
    tests: frozenset[str]
    """The names that the ``if`` blocks around it test to be None, to be true, or to be there, as ``hasattr`` does."""


_Parts = Iterable[tuple[CodeType, float, float]]
"""Code, and the two offsets between which it runs, the second included."""
_Functions = Mapping[str, Collection[CodeType]]
"""Functions that code may call, by name."""


@functools.cache
def set_by(code: CodeType) -> frozenset[str]:
    """The names that code sets or changes, its own variables among them."""
    return frozenset(name for each in _effects(code) for name in each.changes | each.own)


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
    parts, untested = list(parts), frozenset[str]()
    running = set() if of_functions else {code for code, _, _ in parts}
    named, called = {"__call__"}, [(each, -1, _ALL) for each in functions.get("__call__", ())]
    todo = [(part, untested) for part in (*parts, *called)]
    while todo:
        (code, first, last), around = todo.pop()
        for each in _effects(code):
            if first < each.offset <= last:
                tests = each.tests | around
                yield each._replace(tests=tests) if around else each, code in running
                inner = [each.inner] if each.inner else []
                inner += [own for name in each.calls - named for own in functions.get(name, ())]
                todo += [((own, -1, _ALL), tests) for own in inner]
                named |= each.calls


@functools.cache
def _effects(code: CodeType) -> list[_Effects]:
    reader = _EffectsReader(sets_by_name=not _BY_NAME.isdisjoint(code.co_names))
    return list(map(reader.read, *instructions_of(code)))


class _EffectsReader:
    """Finds the effects of instructions, read in order: an instruction changes what those before it have loaded."""

    def __init__(self, *, sets_by_name: bool) -> None:
        self._sets_by_name = sets_by_name
        """True for code that may set attributes whose names are strings in it."""
        self._loads: _Loads = defaultdict(list)
        self._texts: list[tuple[dis.Positions | None, str]] = []
        """Strings in the code, and their positions."""
        self._seen: defaultdict[int | None, set[tuple[str, frozenset[str]]]] = defaultdict(set)
        """Names that were read, by line, with the variables of which each is an attribute."""
        self._is_in_place = False
        """True after ``+=`` and the like."""
        self._before = ("", "")
        """The two instructions before."""
        self._tests: list[tuple[int, set[str]]] = []
        """Where the ``if`` blocks around end, and the names that they test."""

    def read(self, each: dis.Instruction, shown: Accesses) -> _Effects:
        """The effects of the next instruction; ``shown``: its accesses, see ``instructions_of``."""
        where, kind, accesses = each.positions, each.opname, accesses_of(each)
        base = frozenset(() if accesses else _base_names(where, self._loads))
        known = base if where and where.col_offset is not None else frozenset[str]()
        changes, own = self._changes(each, base), set[str]()
        self._tests = [(end, tested) for end, tested in self._tests if each.offset < end]
        for access, name in accesses:
            if access != "LOAD" and (access, name) in shown:
                (own if "FAST" in kind else changes).add(name)
        seen = self._seen[where and where.lineno]
        effects = _Effects(
            each.offset,
            changes=frozenset(changes),
            own=frozenset(own),
            carries=frozenset(self._carried(each, base, known, changes)),
            own_carries=frozenset(Carried(name, "own") for name in own if self._is_in_place or (name, known) in seen),
            calls=base if kind.startswith("CALL") else frozenset(),
            inner=each.argval if isinstance(each.argval, CodeType) else None,
            sets=kind in _SETS or (kind in _LOADS_ATTRIBUTE and each.argval in _SETTING),
            tests=frozenset[str]().union(*(tested for _, tested in self._tests)),
        )
        self._note(each, accesses, shown, known)
        return effects

    def _note(self, each: dis.Instruction, accesses: Accesses, shown: Accesses, known: frozenset[str]) -> None:
        """Notes what an instruction has loaded and tested, for those after it."""
        where, kind = each.positions, each.opname
        line = where and where.lineno
        names = {each.argval} if kind in _LOADS_ATTRIBUTE else set()
        for place, (access, name) in enumerate(accesses):
            if access == "LOAD" and place:  # of two variables the positions are those of the first
                self._loads[line, None].append((dis.Positions(line), name))
            elif access == "LOAD":
                names.add(name)
        if where:
            self._loads[where[::2]] += [(where, name) for name in names]
        read = {name for access, name in shown if access == "LOAD"} if accesses else names
        self._seen[line] |= {(name, known) for name in read}
        if kind == "LOAD_CONST" and isinstance(each.argval, str):
            self._texts.append((where, each.argval))
        if kind != "SWAP":
            self._is_in_place = kind == "BINARY_OP" and each.argrepr.endswith("=")
        if kind.startswith("POP_JUMP") and each.argval > each.offset and "COMPARE_OP" not in self._before and line:
            lines = range(line, ((where and where.end_lineno) or line) + 1)
            tested = {name for one in lines for name, _ in self._seen[one]}
            tested |= {text for at, text in self._texts if at and at.lineno in lines}
            self._tests.append((each.argval, tested))
        self._before = self._before[1], kind

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
            found = {name for name in changes if self._is_in_place or (name, known) in self._seen[line]}
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
    clear discard pop popitem popleft readline remove load_state_dict move_to_end partition reverse rotate sort
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
            for name in (key, value.__name__, value.__code__.co_name):
                found[name].append(value.__code__)
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
    return frozenset(changed_names(*_read_by(kind), of_functions=True))


@functools.cache
def counted_by_reading(reader: type | FunctionType) -> frozenset[str]:
    """The names to which a data set, transform or collate function adds in reading, in the words of a ``Snapshot``."""
    parts, functions = _read_by(reader)
    named = {name for codes in functions.values() for code in codes for name in (*code.co_names, *code.co_freevars)}
    counted = named & {each.name for each in carried_names(parts, functions) if each.what == "value"}
    word = "attribute" if isinstance(reader, type) else "variable"
    return frozenset(f"the {word} '{name}' of {reader.__qualname__}" for name in counted)


def _read_by(reader: type | FunctionType) -> tuple[_Parts, _Functions]:
    functions: dict[str, list[CodeType]] = defaultdict(list)
    for name, method in methods_of(reader) if isinstance(reader, type) else [("__call__", reader)]:
        functions[name] += [method.__code__] if is_users_module(method.__module__) else []
    return [(code, -1, _ALL) for name in _READING for code in functions[name]], functions


_READING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")


def offsets_of_frames() -> dict[FrameType, int]:
    """Where the user's running frames are, for a later ``changed_since``."""
    return {frame: frame.f_lasti for frame in users_frames()}


def changed_since(offsets: Mapping[FrameType, int]) -> set[str]:
    """The names that the user's running frames may have changed since these ``offsets`` of instructions."""
    return changed_names(*_run_since(offsets))


def carried_since(offsets: Mapping[FrameType, int]) -> set[Carried]:
    """Those of ``changed_since`` whose new values depend on the values before."""
    return carried_names(*_run_since(offsets))


def set_after_tests(offsets: Mapping[FrameType, int], names: Collection[str]) -> set[str]:
    """Those of ``changed_since`` that are set where one of ``names`` was tested, as in ``if x is None: x = ...``."""
    effects = [(each, own) for each, own in _effects_of(*_run_since(offsets)) if not each.tests.isdisjoint(names)]
    return {name for each, is_running in effects for name in each.changes | (each.own if is_running else set())}


def _run_since(offsets: Mapping[FrameType, int]) -> tuple[_Parts, _Functions]:
    frames = users_frames()
    firsts = [offsets.get(each, -1) for each in frames]
    parts = [
        (each.f_code, first, each.f_lasti if first <= each.f_lasti else _ALL)  # else a loop has begun again
        for each, first in zip(frames, firsts)
    ]
    return parts, functions_of_frames(frames)


def changed_by_loop() -> set[str]:
    """The names that the user's running frames, and the functions that their code names, may change.

    The functions are called there, or passed on, as a loss is. What constructors set is not among the names.
    """
    frames = users_frames()
    functions = functions_of_frames(frames)
    for name in ("__call__", *CONSTRUCTORS):  # the first may be of a transform, which reading calls
        functions.pop(name, None)
    codes = [frame.f_code for frame in frames]
    named = {name for code in codes for name in code.co_names} | {"forward"}
    called = [code for name in named for code in functions.get(name, ()) if code.co_name not in CONSTRUCTORS]
    return changed_names([(code, -1, _ALL) for code in codes], functions) | changed_names(
        [(code, -1, _ALL) for code in called], functions, of_functions=True
    )


def functions_of_frames(frames: Iterable[FrameType]) -> dict[str, list[CodeType]]:
    """See ``functions_by_name``, for the globals and the variables of frames."""
    return functions_by_name([space for each in frames for space in (each.f_globals, each.f_locals)])
