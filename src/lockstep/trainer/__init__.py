"""The loop of a whole job."""

from lockstep.trainer.state import Accuracy, Meter, Progress, TrainingOutcome, TrainingParts
from lockstep.trainer.trainer import Trainer

__all__ = ["Accuracy", "Meter", "Progress", "Trainer", "TrainingOutcome", "TrainingParts"]
