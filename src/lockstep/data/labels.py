"""Checks labels against the classes before anything is trained on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lockstep.data.naming import look_through, sample_name
from lockstep.errors import DataError


def check_labels(dataset: Any, classes: int) -> None:
    """Refuses a label below 0 or from ``classes`` on (``DataError``, which names the first such sample).

    Looks at ``labels`` or ``targets`` of the data set, or at the second tensor of a ``TensorDataset`` if that
    holds one whole number for each sample. A set that does not show its labels passes.
    """
    labels = known_labels(dataset)
    if labels is None:
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = int(wrong[0])
        others = f" {len(wrong) - 1} more labels are wrong too." if len(wrong) > 1 else ""
        raise DataError(
            f"There are {classes} classes, so labels are 0 to {classes - 1}; "
            f"{sample_name(dataset, first)} has label {labels[first]}.{others} "
            "Correct the label, or give model and data set the number of classes that the labels need."
        )


def known_labels(dataset: Any) -> npt.NDArray[np.int64] | None:
    """The labels of all samples, if the data set shows one whole number for each."""
    inner, numbers = look_through(dataset)
    shown = getattr(inner, "labels", None)
    if shown is None:
        shown = getattr(inner, "targets", None)
    if shown is None and type(inner) is TensorDataset and len(inner.tensors) == 2:
        shown = inner.tensors[1]
    if not isinstance(shown, (torch.Tensor, np.ndarray, list, tuple)):
        return None
    try:
        labels = np.asarray(shown)
    except (ValueError, TypeError):
        return None
    if labels.shape != (len(inner),) or labels.dtype.kind not in "iu":
        return None
    labels = labels.astype(np.int64)
    return labels if numbers is None else labels[numbers]
