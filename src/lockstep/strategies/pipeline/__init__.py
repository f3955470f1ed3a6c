"""Pipeline parallel: stages of the model in different processes."""

from lockstep.strategies.pipeline.measuring import measured_split
from lockstep.strategies.pipeline.opening import open_pipeline
from lockstep.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline", "measured_split", "open_pipeline"]
