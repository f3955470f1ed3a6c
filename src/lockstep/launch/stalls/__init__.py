"""Detects that a run is stalled, which rank holds it up, and in which line of code."""

from lockstep.launch.stalls.report import describe, report_stall, snapshot_lines
from lockstep.launch.stalls.stall_watch import Stall, StallWatch, take_snapshots

__all__ = ["Stall", "StallWatch", "describe", "report_stall", "snapshot_lines", "take_snapshots"]
