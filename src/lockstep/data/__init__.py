"""Data: which samples a rank reads, how they are read, and the formats they are stored in."""

from lockstep.data.adopt import Source, adopt, check_batch_size
from lockstep.data.arrow_files import ArrowFiles
from lockstep.data.batch import Batch, MicroBatch
from lockstep.data.bucketed import Bucketed, PadSequences
from lockstep.data.cifar10 import CIFAR10
from lockstep.data.csv_table import CSVTable
from lockstep.data.digits import Digits
from lockstep.data.finish import Normalize
from lockstep.data.hugging_face import HuggingFace
from lockstep.data.idx import IDX, read_idx
from lockstep.data.image_arrays import ArrayTransform, ImageArrays, PadCropFlip
from lockstep.data.image_folder import ImageFolder
from lockstep.data.image_transforms import CenterCrop, Cut, ImageTransform, RandomResizedCrop, Squeeze
from lockstep.data.keyed import EVALUATION_EPOCH, SampleKeys
from lockstep.data.labels import check_labels, known_labels
from lockstep.data.loader import EvaluationLoader, StepLoader
from lockstep.data.mixing import Mixed, RandomErasing
from lockstep.data.naming import sample_name
from lockstep.data.numpy_files import NumpyArrays
from lockstep.data.reader import BatchDataset, BrokenSample
from lockstep.data.skipping import SkipBroken
from lockstep.data.tar_shards import TarShards
from lockstep.data.tokens import TokenFiles
from lockstep.data.weighted import Weighted, class_weights

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
    "RandomErasing",
    "RandomResizedCrop",
    "SampleKeys",
    "SkipBroken",
    "Source",
    "Squeeze",
    "StepLoader",
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
