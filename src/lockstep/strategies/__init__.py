"""Ways to train: one file or folder each."""

from lockstep.config.strategy_options import STRATEGIES
from lockstep.distributed.process_group import Groups
from lockstep.strategies.ddp import DistributedDataParallel, Single
from lockstep.strategies.loop_writes import one_sided_writes
from lockstep.strategies.open_strategy import open_strategy
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.strategy import STOP_CODES, Compute, IndependentStrategy, StepResult, Strategy

__all__ = [
    "STOP_CODES",
    "STRATEGIES",
    "Compute",
    "DistributedDataParallel",
    "Groups",
    "IndependentStrategy",
    "Pipeline",
    "Single",
    "StepResult",
    "Strategy",
    "one_sided_writes",
    "open_strategy",
]
