"""Recomputes a step of a run, or one micro-batch of it, on one device, and compares its gradient with the record."""

from lockstep.replay.origin import Origin, find_origin
from lockstep.replay.report import ReplayReport, describe
from lockstep.replay.walk import ReplayRequest, replay

__all__ = ["Origin", "ReplayReport", "ReplayRequest", "describe", "find_origin", "replay"]
