"""Starts ranks, watches them, and ends them."""

from lockstep.launch.parent_death import die_with_parent

__all__ = ["die_with_parent"]
