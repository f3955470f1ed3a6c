"""Hooks that users put on modules and parameters: where there are some, and in which order they run.

    parameter    [keys] user's, user's [keys]  Lockstep's, which takes the gradient
    module       [keys] user's, user's [keys]  Lockstep's, which ends the unit

A hook of Lockstep runs after the user's, however late those are registered, so that it sees what they leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hooks = MutableMapping[int, Callable[..., Any]]


def hooks_made() -> int:
    """A number that grows with every hook that is registered in this process."""
    return RemovableHandle.next_id


def has_held_nodes(model: nn.Module) -> bool:
    """Returns whether somebody keeps nodes that add up gradients of a model, which may have hooks of their own."""
    edge: Any = torch.autograd.graph.get_gradient_edge  # torch's stub of a node has a method "metadata"
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        edge(each).node.metadata["lockstep"] = True  # a node that nobody keeps is made anew below
    return any("lockstep" in edge(each).node.metadata for each in trained)


def is_users(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook is none of Lockstep's own."""
    while isinstance(hook, partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith("lockstep.")


def is_hooked(hooks: Mapping[int, Callable[..., Any]] | None) -> bool:
    """Returns whether there is a user's hook among some."""
    return bool(hooks) and any(is_users(hook) for hook in hooks.values())  # type: ignore[union-attr]  # not None here


def forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """The hooks that run before, and after, a module's forward pass."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """The hooks that run before, and after, a module's backward pass."""
    return module._backward_pre_hooks, module._backward_hooks


def gradient_hooks(parameter: Tensor) -> tuple[Hooks, Hooks]:
    """The hooks of a parameter's gradient: those that see it before, and after, it is added up."""
    after: Hooks | None = parameter._post_accumulate_grad_hooks
    return parameter._backward_hooks or {}, after or {}


def hooked_globally() -> bool:
    """Returns whether hooks of the user are called for every module of the process."""
    every = torch.nn.modules.module
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return any(is_hooked(getattr(every, f"_global_{kind}_hooks")) for kind in kinds)


def first_hooked(model: nn.Module) -> str | None:
    """The name of the first module or parameter with a hook of the user; None if there is none."""
    for name, module in model.named_modules():
        if any(map(is_hooked, (*forward_hooks(module), *backward_hooks(module)))):
            return name or "the model"
    for name, parameter in model.named_parameters():
        if any(map(is_hooked, gradient_hooks(parameter))):
            return name
    return None


def hooks_gradients(model: nn.Module) -> bool:
    """Returns whether the user has hooks on gradients of a model: of its parameters, its modules or all modules."""
    kinds = (*map(gradient_hooks, model.parameters()), *map(backward_hooks, model.modules()))
    return hooked_globally() or any(is_hooked(hooks) for pair in kinds for hooks in pair)


def share_hooks(parameter: Tensor, *others: Tensor) -> None:
    """Makes the gradient's hooks of a parameter those of others too, also the ones that come or go later."""
    if not parameter.requires_grad:
        return
    if parameter._backward_hooks is None:
        parameter.register_hook(_no_change).remove()  # type: ignore[no-untyped-call]  # torch's stub
    if parameter._post_accumulate_grad_hooks is None:
        parameter.register_post_accumulate_grad_hook(_no_change).remove()
    for other in others:
        other._backward_hooks = parameter._backward_hooks
        other._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def _no_change(_: Tensor) -> None:
    """Leaves a gradient as it is."""


def put_users_first(hooks: Hooks) -> None:
    """Lets the user's hooks run before Lockstep's; the order is kept otherwise."""
    ranks = [not is_users(hook) for hook in hooks.values()]
    if ranks != sorted(ranks):
        _reorder(hooks, lambda number: not is_users(hooks[number]))


class Surrounded:
    """Two hooks of Lockstep, which run before the first and after the last of a user's."""

    def __init__(self, hooks: Hooks, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self.hooks = hooks
        self._begin, self._end = RemovableHandle(hooks), RemovableHandle(hooks)
        hooks[self._begin.id], hooks[self._end.id] = begin, end

    def arrange(self) -> None:
        """Puts them where they belong, after the user has registered another hook."""
        ranks = {self._begin.id: 0, self._end.id: 2}
        order = [ranks.get(number, 1 if is_users(hook) else 3) for number, hook in self.hooks.items()]
        if order != sorted(order):
            _reorder(self.hooks, lambda number: ranks.get(number, 1 if is_users(self.hooks[number]) else 3))

    def remove(self) -> None:
        """Takes them away."""
        self._begin.remove()
        self._end.remove()


def _reorder(hooks: Hooks, rank: Callable[[int], int]) -> None:
    """Sorts hooks in place: torch reads a dictionary's own order, which ``move_to_end`` does not change."""
    ordered = [(number, hooks[number]) for number in sorted(hooks, key=rank)]
    hooks.clear()
    hooks.update(ordered)
