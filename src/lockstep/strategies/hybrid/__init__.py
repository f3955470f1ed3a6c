"""Meshes that need more than their parts: the stages of a pipeline, each shared out by rows over an axis ``fsdp``."""

from lockstep.strategies.hybrid.strategy import ShardedPipeline

__all__ = ["ShardedPipeline"]
