"""Delays the import of torch's compiler in processes that never compile: an optional acceleration of the start.

The first optimizer imports ``torch._dynamo``, sympy and 800 other modules (over a second, on every rank),
only to tell the compiler "do not trace this" and "break the graph here". Without a compiler both have no
effect, so the functions concerned run without their wrappers, and an import of ``torch._dynamo`` first restores them.

    torch imported ──> postpone_compiler() ──> optimizer.step() runs bare     by the launcher, else by lockstep.init
                                          └──> import torch._dynamo: everything restored, then imported
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"


def postpone_compiler() -> bool:
    """Removes torch's compiler wrappers until the compiler is imported; a second call does nothing.

    Returns False, and changes nothing, if the compiler is imported already, torch is not built like versions 2.8 to
    2.13, or ``gc.freeze`` has hidden its functions.
    """
    import torch._compile
    import torch.optim.optimizer as optimizer

    if _COMPILER in sys.modules:
        return False
    if any(isinstance(finder, _RestoreBeforeImport) for finder in sys.meta_path):
        return True
    hiding = torch._compile._disable_dynamo(_nothing)
    breaking = optimizer._use_grad_for_differentiable(_nothing)
    if not (_closes_over(hiding, "fn") and _closes_over(breaking, "func")):
        return False
    hidden = [each for each in _sharing(hiding.__code__) if each is not hiding]
    if not hidden:
        return False
    place = hiding.__code__.co_freevars.index("fn")
    functions = [each.__closure__[place].cell_contents for each in hidden if each.__closure__]
    undo = [undone for function in functions for undone in _leave_bare(function)]
    bare = _bare_step(_nothing).__code__
    undo.extend(_swap_code(function, bare) for function in _sharing(breaking.__code__))
    sys.meta_path.insert(0, _RestoreBeforeImport(undo))
    return True


def apart_from_graphs(function: _Function) -> _Function:
    """A method of ours that torch.compile leaves out of its graphs where the user compiles a step of the loop."""
    disabled = cache(lambda: sys.modules[_COMPILER].disable(function))

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return (disabled() if _COMPILER in sys.modules else function)(*given, **named)

    return call  # type: ignore[return-value]  # it has the signature of the function


class _RestoreBeforeImport:
    """Restores the wrappers when the compiler is imported; finds no module itself."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == _COMPILER:
            while self._undo:
                self._undo.pop()()
            if self in sys.meta_path:
                sys.meta_path.remove(self)


def _bare_step(func: Callable[..., Any]) -> FunctionType:
    """Wraps ``Optimizer.step`` as torch does, without the graph breaks."""

    def step(*args: Any, **kwargs: Any) -> Any:
        import torch  # this code runs with the globals of the function it replaces

        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return func(*args, **kwargs)

    assert isinstance(step, FunctionType)
    return step


def _leave_bare(hidden: Any) -> list[Callable[[], None]]:
    """Marks the function as if the compiler had marked it already."""
    if hasattr(hidden, _MARK):
        return []
    setattr(hidden, _MARK, hidden)
    return [lambda: delattr(hidden, _MARK)]


def _swap_code(function: FunctionType, code: CodeType) -> Callable[[], None]:
    original, function.__code__ = function.__code__, code

    def restore() -> None:
        function.__code__ = original

    return restore


def _sharing(code: CodeType) -> list[FunctionType]:
    """Returns every function made by the same ``def``."""
    return [entry for entry in gc.get_referrers(code) if type(entry) is FunctionType and entry.__code__ is code]


def _closes_over(function: Any, name: str) -> bool:
    return isinstance(function, FunctionType) and name in function.__code__.co_freevars


def _nothing() -> None:
    pass
