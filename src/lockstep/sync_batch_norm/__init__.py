"""BatchNorm over the rows of all ranks: for CPU and CUDA, in an order that is the same on every rank."""

from __future__ import annotations

from lockstep.sync_batch_norm.module import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert_sync_batch_norm,
    synchronise,
)
from lockstep.sync_batch_norm.rank_rows import RankRows
from lockstep.sync_batch_norm.statistics import Moments, gather_moments

__all__ = [
    "Moments",
    "RankRows",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "convert_sync_batch_norm",
    "gather_moments",
    "synchronise",
]
