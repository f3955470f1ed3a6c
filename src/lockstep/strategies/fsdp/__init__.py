"""Fully sharded data parallel: every rank holds a part of each parameter, its gradient and its optimizer state."""

from lockstep.strategies.fsdp.strategy import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
