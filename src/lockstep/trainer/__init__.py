"""The loop of a whole job."""

from lockstep.trainer.state import Intervals, Meter, Progress, TrainingOutcome, TrainingParts, accuracy
from lockstep.trainer.trainer import Trainer

__all__ = ["Intervals", "Meter", "Progress", "Trainer", "TrainingOutcome", "TrainingParts", "accuracy"]
