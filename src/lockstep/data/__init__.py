"""Data: which samples a rank reads, how they are read, and the formats they are stored in."""

from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.keyed import EVALUATION_EPOCH, SampleKeys
from lockstep.data.loader import EvaluationLoader, StepLoader
from lockstep.data.naming import sample_name
from lockstep.data.reader import BatchDataset, BrokenSample

__all__ = [
    "EVALUATION_EPOCH",
    "Batch",
    "BatchDataset",
    "BrokenSample",
    "EvaluationLoader",
    "MicroBatch",
    "SampleKeys",
    "StepLoader",
    "sample_name",
]
