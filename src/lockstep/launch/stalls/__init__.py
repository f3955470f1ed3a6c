"""Finds out that a run stands still, which rank holds it up, and in which line."""

from lockstep.launch.stalls.probe import ask_all
from lockstep.launch.stalls.report import as_json, describe, sight_lines
from lockstep.launch.stalls.stall_watch import Stall, StallWatch

__all__ = ["Stall", "StallWatch", "as_json", "ask_all", "describe", "sight_lines"]
