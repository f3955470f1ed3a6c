"""Finds what a backward pass makes of the size of gradients, which are those of sums of losses until a step ends.

It computes the gradients of the loss, of twice the loss and, where something differs, of the loss again. Those that a
hook bounds are not doubled, and what a hook keeps of them, such as a norm, is another number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.checks.findings import Findings
from lockstep.run.checks.short_step import parameter_values
from lockstep.strategies import Strategy

SCALES = (1.0, 2.0, 1.0)
"""The factor of the loss in each pass; the third tells what differs by itself."""
_ROUNDING = 1e-3
"""The part of a gradient by which two may differ that are equal but for rounding."""
_OF_SUM = (
    "It sees the gradient of the sum of the losses of a micro-batch, of up to %(most)d samples, not of their mean."
)
_BOUNDED = (
    "The gradient of %(names)s does not double where the loss does: a hook, or the backward pass of an autograd."
    f"Function, bounds it or changes it by its size. {_OF_SUM} Bound p.grad after run.backward."
)
_KEPT = f"A hook or the backward pass sets %(names)s by the size of a gradient. {_OF_SUM} Read p.grad in the loop."
_MOVED = "To see what hooks do, the first step was computed before, and %(names)s has moved on. Use checks='off'."


class GradientSizes:
    """The gradients of passes with the loss times ``SCALES``, and what they have kept."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model, self._values = strategy, model, parameter_values(model)
        self._one: Mapping[str, Tensor] = {}
        self._before: Snapshot | None = None
        self._changes: list[tuple[list[str], list[str]]] = []

    def is_done(self) -> bool:
        """True if no further pass is needed. Collective."""
        return len(self._changes) == 2 and not any(self._strategy.gather_records(any(self._changes[1])))

    def add(self, scale: float, gradients: Mapping[str, Tensor], now: Snapshot) -> None:
        """Takes the gradients of a pass, and the state after it; keeps those of the first."""
        self._one, self._before = self._one or gradients, self._before or now
        one = self._one
        apart = [repr(n) for n, each in gradients.items() if n in one and _are_apart(each / scale, one[n])]
        self._changes.append((apart, list(self._before.changed(now))))

    def warnings(self, moved: list[str]) -> dict[str, list[str]]:
        """The texts of what was found on any rank, with the names that they tell. Collective.

        Args:
            moved: names of what was not put back.

        Raises:
            ConfigError: a hook writes into parameters.
        """
        last = self._changes[-1]
        bounded, kept = ([n for n in names if n not in last[k]] for k, names in enumerate(self._changes[1]))
        written = [name for name, value in parameter_values(self._model).items() if value != self._values[name]]
        Findings(written=written).of_all_ranks(self._strategy).refuse()
        everyone = zip(*self._strategy.gather_records([bounded, kept, moved]), strict=True)
        found = zip((_BOUNDED, _KEPT, _MOVED), everyone, strict=True)
        return {text: list(dict.fromkeys(itertools.chain(*of_ranks))) for text, of_ranks in found}


def _are_apart(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > _ROUNDING * other.norm())
