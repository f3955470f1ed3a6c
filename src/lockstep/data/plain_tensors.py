"""Recognises sets that are nothing but tensors with a row for each sample, however they are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.data.image_arrays import ImageArrays

_READING = ("get_batch", "__getitem__")


def plain_tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors whose rows are the samples; None of a set that is or does anything else.

    They are those of a ``TensorDataset``, and the images and labels of a set in memory that nothing transforms.
    """
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if isinstance(dataset, ImageArrays) and dataset.transform is None:
        own = all(getattr(type(dataset), name) is getattr(ImageArrays, name) for name in _READING)
        return (dataset.images, dataset.labels) if own else None
    return None
