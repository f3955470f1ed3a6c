"""Data parallel in one process: a replica and a thread per device."""

from lockstep.strategies.dp.strategy import DataParallel

__all__ = ["DataParallel"]
