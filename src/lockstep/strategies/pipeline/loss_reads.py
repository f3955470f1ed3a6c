"""Values that a loss function reads beside its arguments, and whether another process's stage has just changed them.

    hook on stage 0     kept["x"] = output        in the process of stage 0
    loss                ... + kept["x"].norm()     in the process of the last stage, whose ``kept`` is another

Python has one ``kept`` in each process, so such a loss would read nothing, or something old. What a function can read
is found from its code: closures, globals and attributes that it mentions, and what lies in dictionaries and lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import names_in

_DEEPEST, _MOST = 6, 2000
"""How far, and how many values, are looked at."""
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
            stage: the name of the module that the pass began with.
        """
        after = _readable(self._function)
        changed = [name for name in {**self._before, **after} if not _is_same(self._before, after, name)]
        if changed:
            raise ConfigError(
                f"The loss reads {changed[0]!r}, which a hook or a module's forward changes in the stage that begins "
                f"with {stage!r}. Under a pipeline the loss runs in another process, whose {changed[0]!r} stays as it "
                "is. Return what the loss needs from the forward of the model, cut the model with pipeline.split so "
                "that the module is in the last stage, or use strategy 'ddp' or 'fsdp'."
            )


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
    found += [(n, function.__globals__[n]) for n in sorted(mentioned) if n in function.__globals__]
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
