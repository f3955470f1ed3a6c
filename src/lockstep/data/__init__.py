"""Data: which samples a rank reads, how they are read, and the formats they are stored in."""

from lockstep.data.adopt import Source, Stream, adopt, check_batch_size
from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.formats.arrow_files import ArrowFiles, HuggingFace
from lockstep.data.formats.cifar10 import CIFAR10
from lockstep.data.formats.csv_table import CSVTable
from lockstep.data.formats.idx import IDX, read_idx
from lockstep.data.formats.numpy_files import NumpyArrays
from lockstep.data.formats.tar_shards import TarShards
from lockstep.data.formats.tokens import TokenFiles
from lockstep.data.images.image_arrays import ArrayTransform, Digits, ImageArrays, PadCropFlip
from lockstep.data.images.image_folder import ImageFolder, PhotoFiles
from lockstep.data.images.transforms import (
    CenterCrop,
    Cut,
    ImageTransform,
    Normalize,
    RandomResizedCrop,
    Resize,
    Squeeze,
)
from lockstep.data.keyed import EVALUATION_EPOCH, SampleKeys
from lockstep.data.labels import check_labels, known_labels
from lockstep.data.loader import EvaluationLoader, StepLoader
from lockstep.data.naming import sample_name
from lockstep.data.reader import BatchDataset, BrokenSample
from lockstep.data.wrappers.bucketed import Bucketed, PadSequences
from lockstep.data.wrappers.mixup import Mixed, RandomErasing
from lockstep.data.wrappers.skipping import SkipBroken
from lockstep.data.wrappers.weighted import Weighted, class_weights

__all__ = [
    "CIFAR10",
    "EVALUATION_EPOCH",
    "IDX",
    "ArrayTransform",
    "ArrowFiles",
    "Batch",
    "BatchDataset",
    "BrokenSample",
    "Bucketed",
    "CSVTable",
    "CenterCrop",
    "Cut",
    "Digits",
    "EvaluationLoader",
    "HuggingFace",
    "ImageArrays",
    "ImageFolder",
    "ImageTransform",
    "MicroBatch",
    "Mixed",
    "Normalize",
    "NumpyArrays",
    "PadCropFlip",
    "PadSequences",
    "PhotoFiles",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "SampleKeys",
    "SkipBroken",
    "Source",
    "Squeeze",
    "StepLoader",
    "Stream",
    "TarShards",
    "TokenFiles",
    "Weighted",
    "adopt",
    "check_batch_size",
    "check_labels",
    "class_weights",
    "known_labels",
    "read_idx",
    "sample_name",
]
