"""Values that a loss, or a stage, reads beside its arguments, and whether another process's stage has changed them.

    hook on stage 0     kept["x"] = output        in the process of stage 0
    loss                ... + kept["x"].norm()     in the process of the last stage, whose ``kept`` is another

Python has one ``kept`` in each process, so such a loss would read nothing, or something old; so would a forward of
another stage. What a function can read is found from its code: closures, globals and attributes that it mentions, and
what lies in containers.
"""

from __future__ import annotations

import dis
import re
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.users_code import codes_in, is_users_module, names_in
from lockstep.core.values import (
    ATTRIBUTE,
    CONTAINERS,
    ENTRY,
    INNER,
    NAMESPACES,
    OF_CLASS,
    globals_of,
    inside,
    is_namespace,
    of_class,
    stored_in,
    version_of,
)
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.numerics.hooks import backward_hooks, forward_hooks, gradient_hooks, is_users
from lockstep.strategies.pipeline.chain import without_parts

_DEEPEST, _MOST = 6, 20_000
"""How far, and how many values, are looked at."""
_WALKING = frozenset(("modules", "named_modules", "children", "named_children", "get_submodule", "apply"))
"""By these a function reaches modules without their names."""
_STORING = frozenset(("setattr", "__setitem__", "setdefault"))
"""By these a hook keeps something under a name that is text."""
_ADDING = frozenset(("append", "appendleft", "extend", "insert", "add", "clear", "update"))
"""By these it keeps something without reading what is there."""
_IN_PLACE = re.compile("[a-z].*[a-z0-9]_|step|register_hook")
"""The functions and attributes by which a hook changes a gradient, or an output, without giving another one."""
_COUNTING = (("COPY", "COPY"), ("COPY", "LOAD_ATTR"))
_MOST_FUNCTIONS = 20
_LIBRARIES = (
    *("torch", "numpy", "lockstep"),
    *("builtins", "collections", "functools", "math", "random", "typing"),
)
_OPEN = (*CONTAINERS, *NAMESPACES, np.ndarray, FunctionType, BuiltinFunctionType, partial, type)
"""Objects of these that hold what the user puts there."""


class LossReads:
    """The values that a loss function, or a metric, can read from outside."""

    def __init__(self, function: Callable[..., Any], kind: str = "loss") -> None:
        self._function, self._kind = function, kind
        self._before = _readable(function)

    def require_unchanged(self, stage: str) -> None:
        """Raises ``ConfigError`` where a forward pass changed something since this was made.

        Args:
            stage: the name of the module that the pass began with; "" for the model.
        """
        after = _readable(self._function)
        changed = [name for name in {**self._before, **after} if not _is_same(self._before, after, name)]
        if changed:
            where = f"the stage that begins with {stage!r}" if stage else "the model"
            raise ConfigError(
                f"The {self._kind} reads {changed[0]!r}, which a hook or a module's forward changes in {where}. Under "
                f"a pipeline it runs in another process, whose {changed[0]!r} stays as it is. Return what it needs "
                "from the forward of the model, cut the model with pipeline.split so that the module is in the "
                "last stage, or use strategy 'ddp' or 'fsdp'."
            )


class StagesRead:
    """The values that the forwards of other processes' stages can read beside what they are given.

    Hooks that may change a value count, gradient hooks too, but only with what they read by a fixed name:
    many hooks only keep something for the loop, each under a key of its own.

    Args:
        modules: of these stages, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before, self._before_hooks = self._found(), self._read_by_hooks()

    def require_unchanged(self, stage: str) -> None:
        """Raises ``ConfigError`` where a forward pass of this process changed something since this was made.

        Args:
            stage: the name of the module that the pass began with.
        """
        before, after = self._before_hooks, self._read_by_hooks()
        by_hooks = [name for name in {**before, **after} if not _is_same(before, after, name)]
        changed = next(iter((*self._before.changed(self._found()), *by_hooks)), None)
        if changed is not None:
            raise ConfigError(
                f"A hook, a module's forward or the loss changes {changed} in the stage that begins with {stage!r}, "
                "and modules of another stage can read that. Under a pipeline these run in another process, where it "
                "stays as it is. Return what they need from the module before them, in a tuple or a dict with the "
                "activations, cut the model with pipeline.split so that these modules are in one stage, or use "
                "strategy 'ddp' or 'fsdp'."
            )

    def _found(self) -> Snapshot:
        modules = {name: without_parts(each) for name, each in self._modules.items()}
        return Snapshot(modules, restorable=False, gradients=False)

    def _read_by_hooks(self) -> dict[str, tuple[Any, int]]:
        with torch._C.DisableTorchFunctionSubclass():  # the parameters are not in this process
            modules = self._modules.values()
            of_modules = [(*forward_hooks(each), *backward_hooks(each)) for each in modules]
            tensors = [p for each in modules for p in each._parameters.values() if p is not None]
            kinds = [*chain.from_iterable(of_modules), *chain.from_iterable(map(gradient_hooks, tensors))]
            users = [hook for kind in kinds for hook in kind.values() if is_users(hook)]
            read = [pair for hook in users for pair in _read_by_hook(hook)]
            return {label: (value, version_of(value)) for label, value in read}


def _read_by_hook(hook: Any) -> Iterator[tuple[str, Any]]:
    """The numbers, tensors and lists that a hook reads by fixed names, with these, if it may change a value."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    while not isinstance(hook, FunctionType):
        if isinstance(hook, partial):
            args, named, hook = [*hook.args, *args], {**hook.keywords, **named}, hook.func
        elif isinstance(hook, MethodType):
            args, hook = [hook.__self__, *args], hook.__func__
        else:
            call = vars(type(hook)).get("__call__")
            if not isinstance(call, FunctionType) or not is_users_module(call.__module__):
                return
            args, hook = [hook, *args], call
    functions, values = [hook], [*zip(hook.__code__.co_varnames, args), *named.items()]
    for function in functions:  # and those that it calls, which are added
        names = set(names_in(function.__code__))
        methods = [getattr(type(each), name, None) for each in args[:1] for name in sorted(names)]
        found = [*_read_by(function, set()), *(("", each) for each in methods)]
        values += [pair for pair in found if not isinstance(pair[1], FunctionType | NoneType)]
        called = [each for _, each in found if isinstance(each, FunctionType) and each not in functions]
        functions += filter(lambda each: is_users_module(each.__module__), called[:_MOST_FUNCTIONS])
    codes = [code for each in functions for code in codes_in(each.__code__)]
    if not any(map(_changes_values, codes)) or not _STORING.isdisjoint(hook.__code__.co_names):
        return
    read = {name for code in codes for name in _names_read(code)}
    read |= {each for label, each in values if label in read and isinstance(each, str)}  # names of entries
    for label, value in values:
        if label in read:
            yield from _read_within(f"the variable {label!r}", repr(label), value, read, 3)


def _changes_values(code: CodeType) -> bool:
    """Returns whether a hook may give another value, or change one in place or by a hook that it registers."""
    keywords = {name for each in code.co_consts if isinstance(each, tuple) for name in each}
    return not keywords.isdisjoint(("out", "inplace")) or any(
        (after.opname == "RETURN_VALUE" and (each.opname, each.argval) != ("LOAD_CONST", None))
        or ("STORE_FAST" in after.opname and each.opname == "BINARY_OP" and each.argrepr.endswith("="))
        or (each.opname == "STORE_ATTR" and each.argval in ("grad", "data"))
        or (after.opname in ("STORE_SUBSCR", "STORE_SLICE") and _is_tensor(code, each, after))
        or (each.opname in ("LOAD_ATTR", "LOAD_METHOD") and _IN_PLACE.fullmatch(each.argval))
        for each, after in pairwise(dis.get_instructions(code))
    )


def _is_tensor(code: CodeType, key: dis.Instruction, store: dis.Instruction) -> bool:
    """Returns whether an entry is set in what may be a tensor that the code is given, not in a dict for notes."""
    begin, given = store.positions and store.positions[::2], code.co_varnames[: code.co_argcount]
    loads = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST")]
    pairs = [(each.argval if isinstance(each.argval, tuple) else (each.argval,), each.positions) for each in loads]
    # Python 3.13 loads two variables at once, and says where the first stands.
    found = {names[0] for names, place in pairs if place and place[::2] == begin}
    found = found or {names[1] for names, place in pairs if names[1:] and place and begin and place[0] == begin[0]}
    if isinstance(key.argval, str) and key.opname != "BUILD_SLICE":  # the key is a name
        given = () if key.opname == "LOAD_CONST" else given[1:]
    return not found.isdisjoint(given)


def _names_read(code: CodeType) -> Iterator[Any]:
    """The variables, attributes and keys that code loads for more than to store, to count or to add an entry there."""
    every, of_inner = list(dis.get_instructions(code)), {*code.co_cellvars, *code.co_freevars}
    for before, each, after, later in zip(every[-1:] + every, every, every[1:], every[2:] + every[-1:]):
        is_counted = before.opname == "COPY" or (after.opname, later.opname) in _COUNTING
        is_stored = is_counted or after.opname == "STORE_SUBSCR" or after.argval in _ADDING
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith(("LOAD_FAST", "LOAD_CLOSURE")):  # these hand it to an inner function
            names = tuple(name for name in names if name not in of_inner)
        if each.opname.startswith("LOAD"):
            yield from names[:-1] if is_stored else names


def _read_within(where: str, label: str, value: Any, read: set[Any], depth: int) -> Iterator[tuple[str, Any]]:
    """The value that is read, or what lies in it under names that are read, with words for each."""
    if isinstance(value, int | float | str | Tensor | np.ndarray):
        yield where, value
    elif isinstance(value, list | deque):
        yield where, (*stored_in(value),)
    elif depth:
        held = {part.key: part.value for part in (*of_class(type(value)), *inside(value))}
        held |= {**held["_buffers"], **held["_modules"]} if isinstance(value, nn.Module) else {}
        for key in [key for key in held if isinstance(key, str | int) and key in read]:
            yield from _read_within(f"{key!r} of {label}", f"{key!r} of {label}", held[key], read, depth - 1)


def _is_same(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return False
    (old, version), (new, now) = before[name], after[name]
    pairs = zip(old, new) if isinstance(old, tuple) and isinstance(new, tuple) else [(old, new)]
    return version == now and all(a is b or (isinstance(a, int | float | str) and a == b) for a, b in pairs)


def _readable(function: Callable[..., Any]) -> dict[str, tuple[Any, int]]:
    """The values by how they are reached, each with the version of a tensor or the length of a container."""
    names: set[str] = {"forward", "__call__"}
    while True:
        known = len(names)
        found = {label: (value, version_of(value)) for label, value in _reach(function, names)}
        if len(names) == known:
            return found


def _reach(function: Callable[..., Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Values with their labels; adds to ``names`` what the code on the way mentions."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any, int]] = deque([("", function, 0)])
    while waiting and len(seen) < _MOST:
        label, value, depth = waiting.popleft()
        if label:
            yield label, value
        if id(value) not in seen and depth <= _DEEPEST:
            seen.add(id(value))
            waiting += [(name, each, depth + 1) for name, each in _inside(label, value, names)]


def _inside(label: str, value: Any, names: set[str]) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module) and type(value).__module__.startswith("lockstep."):
        value = vars(value).get("_model", value)  # the user's, behind the prepared one
    if isinstance(value, MethodType):
        return [(label, value.__func__), (label.rpartition(".")[0] or "self", value.__self__)]
    if type(value).__module__.startswith("lockstep.run."):  # it calls the user's function
        return [(label, each) for each in vars(value).values() if callable(each)]
    found = _read_by(value, names) if isinstance(value, FunctionType) else []
    if isinstance(value, nn.Module):
        is_walked = isinstance(value, nn.Sequential | nn.ModuleList | nn.ModuleDict) or names & _WALKING
        modules = value.named_modules() if is_walked else ()
        found += [(f"{label}.{name}", each) for name, each in modules if name]
        own = {**value._modules, **value._parameters, **value._buffers}
        found += [(f"{label}.{key}".lstrip("."), each) for key, each in own.items() if key in names]
    elif type(value).__module__.partition(".")[0] in _LIBRARIES and not isinstance(value, _OPEN):
        return []
    is_whole = is_namespace(type(value)) and not isinstance(value, SimpleNamespace | Namespace)  # as a UserDict
    kind = value if isinstance(value, type) else type(value)
    for part in (*inside(value, most=_MOST), *of_class(kind)):
        if part.how in (ENTRY, INNER) or (part.how in (ATTRIBUTE, OF_CLASS) and (part.key in names or is_whole)):
            found.append((part.path(label).lstrip("."), part.value))
    methods = ((name, getattr(kind, name, None)) for name in sorted(names))  # those of installed packages, too
    return found + [(f"{label}.{name}", each) for name, each in methods if isinstance(each, FunctionType)]


def _read_by(function: FunctionType, names: set[str]) -> list[tuple[str, Any]]:
    """The values that a function can read: cells, defaults, and globals that it mentions."""
    if (function.__module__ or "").split(".")[0] in _LIBRARIES and not function.__closure__:
        return []
    code, space = function.__code__, function.__globals__
    names |= names_in(code)
    names |= {text for each in codes_in(code) for text in each.co_consts if isinstance(text, str)}  # those of getattr
    defaulted = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) :]
    parts = [part for part in inside(function) if part.how != ATTRIBUTE]
    found = [(defaulted[part.key] if isinstance(part.key, int) else part.key, part.value) for part in parts]
    for part in globals_of(names_in(code), space):
        module = "" if part.holder is space else f"{part.holder.get('__name__')}."
        found.append((f"{module}{part.key}", part.value))
    return found
