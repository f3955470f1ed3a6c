"""Which code is the user's own, by its file or its module, and what it names."""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

PACKAGE = str(Path(__file__).parents[1]) + os.sep
"""The folder of Lockstep."""
LIBRARIES = tuple(
    path + os.sep
    for path in dict.fromkeys(
        [
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *(each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")),
        ]
    )
    if path
)
"""The folders of Python itself and of installed packages, those of the system and of the user among them."""
CLOSED_PACKAGES = (
    sys.stdlib_module_names
    | {"lockstep", "torch", "numpy", "builtins"}
    | {"_pytest", "pluggy", "xdist", "execnet"}  # which run the user's tests
    | {"IPython", "ipykernel"}  # and notebooks
) - {"__main__"}
"""Packages whose objects are their own affair."""


def is_users_file(file: str) -> bool:
    """True for code of the user's own, by its file: not of Python, Lockstep or an installed package."""
    return not file.startswith((PACKAGE, *LIBRARIES))


def is_users_module(module: str) -> bool:
    """True for a module of the user's own, by its name: neither installed, nor torch's, nor this package."""
    if module.partition(".")[0] in CLOSED_PACKAGES:
        return False
    if module == "__main__":  # profilers, as python -m cProfile, run scripts under a module of their own
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return not isinstance(file, str) or not file.startswith(LIBRARIES)


def is_users_code(code: CodeType, module: str) -> bool:
    """Returns whether code of a module, by its name, is the user's own."""
    return not code.co_filename.startswith(LIBRARIES) and is_users_module(module)


def is_users_function(function: FunctionType) -> bool:
    """See ``is_users_code``."""
    return is_users_code(function.__code__, function.__module__ or "")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The globals and attributes that code names, that of inner functions included."""
    return frozenset(name for each in codes_in(code) for name in each.co_names)


@functools.cache
def names_asked_for(code: CodeType) -> frozenset[str]:
    """The attributes and globals that code may find absent, as in ``if not hasattr(self, "best")``."""
    texts, is_asking = set[str](), False
    for each in dis.get_instructions(code):
        is_text = each.opname == "LOAD_CONST" and isinstance(each.argval, str)
        texts |= {each.argval} if is_asking and is_text else set()
        is_asking = each.argval in ("hasattr", "getattr", "globals") or (is_asking and not is_text)
    return frozenset(texts).union(code.co_names if {"AttributeError", "NameError"} & {*code.co_names} else ())


@functools.cache
def names_loaded(code: CodeType, *instructions: str) -> frozenset[str]:
    """The names that code loads itself by these instructions, such as LOAD_GLOBAL."""
    return frozenset(str(each.argval) for each in dis.get_instructions(code) if each.opname in instructions)


def names_reached(codes: Iterable[CodeType], functions: Iterable[Callable[..., Any]]) -> set[str]:
    """All names in code, and in functions that have one of these names, and so on."""
    by_name: dict[str, list[CodeType]] = defaultdict(list)
    for function in functions:
        if isinstance(function, FunctionType):
            by_name[function.__name__].append(function.__code__)
    special = [name for name in by_name if name.startswith("__") and name != "__init__"]
    todo = [*codes, *(code for name in (*special, "forward") for code in by_name[name])]
    found, seen = set[str](), set[CodeType]()
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        texts = {each for each in code.co_consts if isinstance(each, str)}
        new = {*code.co_names, *code.co_freevars, *texts} - found
        found |= new
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
        todo += [each for name in new for each in by_name.get(name, ())]
    return found


@functools.cache
def globals_in(code: CodeType) -> frozenset[str]:
    """Those that it names as globals, or imports: an attribute of a method may have the name of a function."""
    kinds = [f"{kind}_{space}" for kind in ("LOAD", "STORE", "DELETE") for space in ("GLOBAL", "NAME")]
    kinds += ["LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME"]  # the first of class bodies, since Python 3.12
    return frozenset[str]().union(*(names_loaded(each, *kinds) for each in codes_in(code)))


def homes_of(code: CodeType) -> list[str]:
    """The qualified names of the functions within which a function is made, the outermost first."""
    return [*itertools.accumulate(code.co_qualname.split(".<locals>.")[:-1], "{}.<locals>.{}".format)]


def methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods of a class of the user's, those that it inherits from others of his among them."""
    for cls in kind.__mro__:
        for name, value in list(vars(cls).items()) if is_users_module(cls.__module__) else ():
            if isinstance(inner := function_of(value), FunctionType):
                yield name, inner


def function_of(value: object) -> object:
    """The function of a property, or of a static or class method; other values as they are."""
    if isinstance(value, property | functools.cached_property):
        return value.fget if isinstance(value, property) else value.func
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def users_frames() -> list[FrameType]:
    """The frames of the user's own code that are running in this thread, the outermost first."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return [each for each in frames if is_users_code(each.f_code, each.f_globals.get("__name__", ""))][::-1]


def owners_of(frames: Sequence[FrameType]) -> list[str]:
    """The words before the variables of each frame: ``fit: ``, and none before those of a script.

    They are ``engine.fit: `` if an inner frame belongs to another function of the same name, such as one that it calls.
    """
    owners = list[str]()
    for number, frame in enumerate(frames, 1):
        code = frame.f_code
        others = {each.f_code for each in frames[number:] if each.f_code.co_qualname == code.co_qualname}
        module = f"{frame.f_globals.get('__name__')}." if others - {code} else ""
        owners.append("" if code.co_name == "<module>" else f"{module}{code.co_qualname}: ")
    return owners
