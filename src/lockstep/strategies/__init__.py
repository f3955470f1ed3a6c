"""Ways to train: one file or folder each."""

from lockstep.strategies.ddp import Single
from lockstep.strategies.loop_writes import one_sided_writes
from lockstep.strategies.open_strategy import open_strategy
from lockstep.strategies.strategy import STOP_CODES, Compute, IndependentStrategy, StepResult, Strategy

__all__ = [
    "STOP_CODES",
    "Compute",
    "IndependentStrategy",
    "Single",
    "StepResult",
    "Strategy",
    "one_sided_writes",
    "open_strategy",
]
