"""Data: which samples a rank reads, how they are read, and the formats they are stored in."""

from lockstep.data.adopt import Source, adopt, check_batch_size
from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.cifar10 import CIFAR10
from lockstep.data.digits import Digits
from lockstep.data.finish import Normalize
from lockstep.data.idx import IDX, read_idx
from lockstep.data.image_arrays import ArrayTransform, ImageArrays, PadCropFlip
from lockstep.data.image_folder import ImageFolder
from lockstep.data.image_transforms import CenterCrop, Cut, ImageTransform, RandomResizedCrop, Squeeze
from lockstep.data.keyed import EVALUATION_EPOCH, SampleKeys
from lockstep.data.labels import check_labels, known_labels
from lockstep.data.loader import EvaluationLoader, StepLoader
from lockstep.data.naming import sample_name
from lockstep.data.reader import BatchDataset, BrokenSample

__all__ = [
    "CIFAR10",
    "EVALUATION_EPOCH",
    "IDX",
    "ArrayTransform",
    "Batch",
    "BatchDataset",
    "BrokenSample",
    "CenterCrop",
    "Cut",
    "Digits",
    "EvaluationLoader",
    "ImageArrays",
    "ImageFolder",
    "ImageTransform",
    "MicroBatch",
    "Normalize",
    "PadCropFlip",
    "RandomResizedCrop",
    "SampleKeys",
    "Source",
    "Squeeze",
    "StepLoader",
    "adopt",
    "check_batch_size",
    "check_labels",
    "known_labels",
    "read_idx",
    "sample_name",
]
