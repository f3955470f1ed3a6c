r"""The learning rate as a function of the optimizer step: a pure value, the same for every number of ranks.

    cosine     _  warm-up up to 1, then half a cosine down to final_factor at the end of the run
              / \
    linear   /   \_ warm-up, then a straight line down to final_factor
    step          |_  multiplied by step_factor after every step_every optimizer steps
    constant   warm-up, then 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "cosine", "linear", "step")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor by which each optimizer step multiplies the learning rate that was asked for."""

    kind: str
    """One of ``SCHEDULES``."""
    steps: int
    """Optimizer steps of the whole run, warm-up included."""
    warmup_steps: int = 0
    """Optimizer steps over which the factor rises in a straight line to 1."""
    final_factor: float = 0.0
    """The factor of ``cosine`` and ``linear`` at the end of the run."""
    step_every: int = 1
    """Optimizer steps between two drops of ``step``, counted after the warm-up."""
    step_factor: float = 0.1
    """The factor of each drop of ``step``."""

    def factor(self, step: int) -> float:
        """The factor of optimizer step ``step`` (from 0); after the last step it stays where it ended."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        after = min(step, self.steps) - self.warmup_steps
        if self.kind == "step":
            return float(self.step_factor ** (after // self.step_every))
        if self.kind == "constant":
            return 1.0
        progress = after / max(1, self.steps - self.warmup_steps)
        falling = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.final_factor + (1 - self.final_factor) * falling
