"""Where a strategy cuts a model, and who decides it: the user, the parameters' bytes, or a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.chain import Link, chain
from lockstep.strategies.pipeline.measuring import measured_split
from lockstep.strategies.pipeline.splitting import split


@dataclass
class Cuts:
    """The parts of a model that its devices or stages hold."""

    option: str
    """The table of options that ``balance`` and ``split`` belong to: layers or pipeline."""
    parts: int
    points: Sequence[str] = ()
    """The module with which each part after the first begins; none: the parts are balanced."""
    by_time: bool = False
    """Whether the time of a forward pass decides."""

    @property
    def missing(self) -> bool:
        """Whether somebody has to call ``measure`` before the model can be cut."""
        return self.by_time and self.parts > 1 and not self.points

    def measure(self, model: nn.Module, inputs: Sequence[Any]) -> list[str]:
        """Split points that balance the time that a forward pass takes here, for ``points``, on all ranks alike.

        Raises:
            ConfigError: the model has too few parts.
        """
        return list(measured_split(model, self.parts, *inputs, strategy=self.option))

    def of(self, model: nn.Module) -> list[list[Link]]:
        """The model's parts in order.

        Raises:
            ConfigError: the model cannot be cut so, or nobody has measured.
        """
        if self.missing:
            raise ConfigError(
                f"{self.option}.balance='time' is measured by lockstep train. In a loop of your own measure once, with "
                "lockstep.strategies.pipeline.measured_split(model, parts, input), and give what it returns as "
                f"{self.option}.split."
            )
        return split(chain(model), self.parts, self.points, self.option)
