"""Services inside a rank beside the training loop: heartbeat, signals, events, stack dumps."""

from lockstep.runtime.events import Callback

__all__ = ["Callback"]
