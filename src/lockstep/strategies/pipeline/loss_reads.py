"""Values that a loss, or a stage, reads beside its arguments, and whether another process's stage has changed them.

    hook on stage 0     kept["x"] = output        in the process of stage 0
    loss                ... + kept["x"].norm()     in the process of the last stage, whose ``kept`` is another

Python has one ``kept`` in each process, so such a loss would read nothing, or something old; so would a forward of
another stage. What a function can read is found from its code: closures, globals and attributes that it mentions, and
what lies in dictionaries and lists.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lockstep.core.users_code import names_in
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.numerics.hooks import forward_hooks, is_users
from lockstep.strategies.pipeline.chain import without_parts

_DEEPEST, _MOST = 6, 2000
"""How far, and how many values, are looked at."""
_STORING = frozenset(("setattr", "__setitem__", "setdefault"))
"""By these a hook keeps something under a name that is text."""
_LIBRARIES = (
    *("torch", "numpy", "lockstep"),
    *("builtins", "collections", "functools", "math", "random", "typing"),
)


class LossReads:
    """The values that a loss function can read from outside.

    Args:
        function: the loss.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
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
                f"The loss reads {changed[0]!r}, which a hook or a module's forward changes in {where}. Under a "
                f"pipeline the loss runs in another process, whose {changed[0]!r} stays as it is. Return what the loss "
                "needs from the forward of the model, cut the model with pipeline.split so that the module is in the "
                "last stage, or use strategy 'ddp' or 'fsdp'."
            )


class StagesRead:
    """The values that the forwards of other processes' stages can read beside what they are given.

    Of their hooks, those count that give another value in the place of an input or output, with what they read by a
    fixed name: many hooks only keep something for the loop, each under a key of its own.

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
                f"A hook or a module's forward changes {changed} in the stage that begins with {stage!r}, and modules "
                "of another stage can read that. Under a pipeline these run in another process, where it stays as it "
                "is. Return what they need from the module before them, in a tuple or a dict with the activations, "
                "cut the model with pipeline.split so that these modules are in one stage, or use strategy 'ddp' or "
                "'fsdp'."
            )

    def _found(self) -> Snapshot:
        return Snapshot({name: without_parts(each) for name, each in self._modules.items()}, restorable=False)

    def _read_by_hooks(self) -> dict[str, tuple[Any, int]]:
        hooks = [
            hook for each in self._modules.values() for kind in forward_hooks(each) for hook in kind.values()
        ]
        users = [hook for hook in hooks if isinstance(hook, FunctionType) and is_users(hook)]
        read = [pair for hook in users for pair in _read_by_hook(hook)]
        return {label: (value, _version(value)) for label, value in read}


def _read_by_hook(hook: FunctionType) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors that a hook reads by a fixed name, if it may return one: where they are, and they."""
    code = list(dis.get_instructions(hook))
    gives = any(
        each.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and before.argval is None)
        for before, each in pairwise(code)
    )
    if not gives or not _STORING.isdisjoint(hook.__code__.co_names):
        return
    read = {
        each.argval
        for each, following in pairwise(code)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD")
        or (
            each.opname == "LOAD_CONST"
            and following.opname != "STORE_SUBSCR"
            and isinstance(each.argval, str)
        )
    }
    for label, value in _read_by(hook, set()):
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        inside = [(f"{key!r} of {label!r}", held[key]) for key in sorted(read) if key in held]
        for where, each in ((f"the variable {label!r}", value), *inside):
            if isinstance(each, int | float | str | Tensor):
                yield where, each


def _is_same(before: dict[str, Any], after: dict[str, Any], name: str) -> bool:
    if name not in before or name not in after:
        return False
    (old, version), (new, now) = before[name], after[name]
    return version == now and (old is new or (isinstance(old, int | float | str) and old == new))


def _readable(function: Callable[..., Any]) -> dict[str, tuple[Any, int]]:
    """The values by how they are reached, each with the version of a tensor or the length of a container."""
    names: set[str] = {"forward", "__call__"}
    while True:
        known = len(names)
        found = {label: (value, _version(value)) for label, value in _reach(function, names)}
        if len(names) == known:
            return found


def _version(value: Any) -> int:
    if isinstance(value, Tensor):
        return value._version if not value.is_inference() else 0
    return len(value) if isinstance(value, (dict, list, set, deque)) else 0


def _reach(function: Callable[..., Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Values with their labels; adds to ``names`` what the code on the way mentions."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any, int]] = deque([("", function, 0)])
    while waiting and len(seen) < _MOST:
        label, value, depth = waiting.popleft()
        if label:
            yield label, value
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        waiting += [(name, each, depth + 1) for name, each in _inside(label, value, names)]


def _inside(label: str, value: Any, names: set[str]) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module) and type(value).__module__.startswith("lockstep."):
        value = vars(value).get("_model", value)  # the user's, behind the prepared one
    if isinstance(value, MethodType):
        return [(label, value.__func__), (label.rpartition(".")[0] or "self", value.__self__)]
    if isinstance(value, partial):
        named = [(f"{label}{key}", each) for key, each in value.keywords.items()]
        return [
            (label, value.func),
            *((f"{label}({number})", each) for number, each in enumerate(value.args)),
            *named,
        ]
    if isinstance(value, FunctionType):
        return _read_by(value, names)
    if isinstance(value, dict):
        return [(f"{label}[{key!r}]", each) for key, each in list(value.items())[:_MOST]]
    if isinstance(value, (list, tuple, deque)):
        return [(f"{label}[{number}]", each) for number, each in enumerate(list(value)[:_MOST])]
    if isinstance(value, (Tensor, type)) or type(value).__module__.split(".")[0] in _LIBRARIES:
        return []
    return _attributes(label, value, names)


def _read_by(function: FunctionType, names: set[str]) -> list[tuple[str, Any]]:
    """The values that a function can read: cells, globals that it mentions, and defaults."""
    if (function.__module__ or "").split(".")[0] in _LIBRARIES and not function.__closure__:
        return []
    mentioned = set(names_in(function.__code__))
    names |= mentioned
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    found += [
        (name, function.__globals__[name]) for name in sorted(mentioned) if name in function.__globals__
    ]
    found += [(f"default {number}", each) for number, each in enumerate(function.__defaults__ or ())]
    return found + list((function.__kwdefaults__ or {}).items())


def _attributes(label: str, value: Any, names: set[str]) -> list[tuple[str, Any]]:
    """The attributes of an object that are mentioned, and the functions of its class that are."""
    own = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        own |= {**value._modules, **value._parameters, **value._buffers}
    found = [(f"{label}.{name}" if label else name, each) for name, each in own.items() if name in names]
    methods = ((name, getattr(type(value), name, None)) for name in sorted(names))
    return found + [(f"{label}.{name}", each) for name, each in methods if isinstance(each, FunctionType)]
