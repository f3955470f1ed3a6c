"""Ways to train: one file or folder each."""

from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.groups import Groups
from lockstep.strategies.opening import open_strategy
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.single import Single
from lockstep.strategy_options import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Compute",
    "DistributedDataParallel",
    "Groups",
    "Pipeline",
    "Single",
    "StepResult",
    "Strategy",
    "open_strategy",
]
