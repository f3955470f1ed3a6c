"""Digests of the gradients of some steps: how they are taken, and where a run keeps them."""

from lockstep.trainer.gradients.digests import digest_gradients
from lockstep.trainer.gradients.micro_batches import MicroBatchWatch
from lockstep.trainer.gradients.record import FILE, GradientDigest, GradientRecord, read_records
from lockstep.trainer.gradients.recorder import GradientRecorder, require_separate_micro_batches

__all__ = [
    "FILE",
    "GradientDigest",
    "GradientRecord",
    "GradientRecorder",
    "MicroBatchWatch",
    "digest_gradients",
    "read_records",
    "require_separate_micro_batches",
]
