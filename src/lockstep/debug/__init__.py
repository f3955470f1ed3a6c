"""Writes what an editor needs to debug one rank, any rank of several, or a rank that runs already."""

from lockstep.debug.vscode import DebugPlan, launch_entries, merge_into, task_entries

__all__ = ["DebugPlan", "launch_entries", "merge_into", "task_entries"]
