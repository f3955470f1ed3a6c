"""Pipeline parallel: stages of the model in different processes."""

from lockstep.strategies.pipeline.partition import measured_split
from lockstep.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline", "measured_split"]
