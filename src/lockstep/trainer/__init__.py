"""The loop of a whole job."""

from lockstep.trainer.meter import Meter, accuracy
from lockstep.trainer.progress import Progress
from lockstep.trainer.trainer import Outcome, Prepared, Rhythm, Settings, Trainer
from lockstep.trainer.watcher import Watcher

__all__ = ["Meter", "Outcome", "Prepared", "Progress", "Rhythm", "Settings", "Trainer", "Watcher", "accuracy"]
