"""The optimizer that ``prepare`` gives back: the user's own, stepped as strategy and precision require."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import ConfigError


class PreparedOptimizer(Optimizer):
    """Stands for the user's optimizer; groups, state and hyperparameters are the very same objects.

    Args:
        optimizer: the user's optimizer.
        step: carries out one step of it; returns whether it was taken (a loss scaler may skip it).
        forget: is told that the gradients were thrown away.

    Raises:
        ConfigError: the optimizer cannot step from gradients alone.
    """

    def __init__(
        self, optimizer: Optimizer, step: Callable[[Optimizer], bool], forget: Callable[[Optimizer], None]
    ) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss several times per step, which is not supported. Use an "
                "optimizer that steps from gradients, such as SGD or AdamW."
            )
        self.wrapped = optimizer
        self._step, self._forget = step, forget
        self.step_was_skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """The user's groups."""
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """The user's state."""
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in torch
        """The user's defaults."""
        return self.wrapped.defaults

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures run several forwards
        """Takes one step from the reduced gradients. Every rank must call this."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) evaluates the loss several times per step, as LBFGS needs, and is not "
                "supported. Call run.backward(batch, loss) and then optimizer.step()."
            )
        self.step_was_skipped = not self._step(self.wrapped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.wrapped.zero_grad(set_to_none)
        self._forget(self.wrapped)

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the user's optimizer its state."""
        self.wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the user's optimizer."""
        self.wrapped.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Prepared{self.wrapped!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Every hyperparameter of every group of every optimizer as text, to compare over ranks."""
    return {
        f"{key} of optimizer {number}, group {position}": repr(
            value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        )
        for number, optimizer in enumerate(optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def implementation(optimizer: Optimizer) -> str:
    """The class and how it computes a step (for-loop, foreach, fused), which decides bits."""
    group = optimizer.param_groups[0]
    how = next((name for name in ("fused", "foreach") if group.get(name)), "default")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {how}"
