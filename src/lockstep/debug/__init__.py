"""Writes what an editor needs to debug one rank, any rank of several, or a rank that runs already."""

from lockstep.debug.editor import DebugPlan, launch_entries, task_entries
from lockstep.debug.settings_file import merge_into

__all__ = ["DebugPlan", "launch_entries", "merge_into", "task_entries"]
