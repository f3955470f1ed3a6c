"""Detects that a run is stalled, which rank holds it up, and in which line of code."""

from lockstep.launch.stalls.report import as_json, describe, snapshot_lines
from lockstep.launch.stalls.stall_watch import Stall, StallWatch, take_snapshots

__all__ = ["Stall", "StallWatch", "as_json", "describe", "snapshot_lines", "take_snapshots"]
