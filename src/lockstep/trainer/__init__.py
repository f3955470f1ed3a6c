"""The loop of a whole job."""

from lockstep.trainer.meter import Meter, accuracy
from lockstep.trainer.outcome import Outcome
from lockstep.trainer.parts import Prepared, Rhythm, Settings
from lockstep.trainer.progress import Progress
from lockstep.trainer.trainer import Trainer
from lockstep.trainer.watcher import Watcher

__all__ = ["Meter", "Outcome", "Prepared", "Progress", "Rhythm", "Settings", "Trainer", "Watcher", "accuracy"]
