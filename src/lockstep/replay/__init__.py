"""Recomputes a step of a run, or one micro-batch of it, on one device, and compares its gradient with the record."""

from lockstep.replay.origin import Origin, find_origin
from lockstep.replay.report import Report, describe
from lockstep.replay.walk import Asked, replay

__all__ = ["Asked", "Origin", "Report", "describe", "find_origin", "replay"]
