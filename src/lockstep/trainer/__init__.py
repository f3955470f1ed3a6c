"""The loop of a whole job."""

from lockstep.trainer.state import Meter, Progress, TrainingOutcome, TrainingParts, accuracy
from lockstep.trainer.trainer import Trainer

__all__ = ["Meter", "Progress", "Trainer", "TrainingOutcome", "TrainingParts", "accuracy"]
