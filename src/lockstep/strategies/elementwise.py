"""Which optimizers update every element from that element alone, and so may be stepped on parts of parameters."""

from __future__ import annotations

from torch import optim

from lockstep.errors import ConfigError
from lockstep.strategy_options import ELEMENTWISE

_KINDS = tuple(getattr(optim, name) for name in ELEMENTWISE)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer's state is a number, or one for each element, as far as is known."""
    return type(optimizer) in _KINDS or bool(getattr(optimizer, "elementwise", False))


def require_elementwise(optimizer: optim.Optimizer, strategy: str) -> None:
    """Raises ``ConfigError`` for an optimizer that is not known to be elementwise.

    A class of one's own that is says so with an attribute ``elementwise = True``.
    """
    if is_elementwise(optimizer):
        return
    known = ", ".join(sorted(ELEMENTWISE))
    raise ConfigError(
        f"Strategy {strategy!r} steps the optimizer on parts of parameters, and {type(optimizer).__name__} is not "
        f"known to update each element from that element alone. Use one of {known}, set elementwise = True on the "
        "class if it does, or use strategy 'ddp'."
    )
