"""Labels, classes and columns of data sets: which are known, whether they are valid, and where two sets differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from lockstep.data.naming import sample_name, unwrap_subset
from lockstep.errors import ConfigError, DataError
from lockstep.text import shorten


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
    inner, numbers = unwrap_subset(dataset)
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


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    """The names of the classes, which are numbers where only their count is given; ``ConfigError`` for neither."""
    if isinstance(classes, Integral):
        names = tuple(map(str, range(int(classes))))
    elif isinstance(classes, str | bytes | Set | Mapping) or not isinstance(classes, Iterable):
        names = ()  # a set has another order in each process
    else:
        names = tuple(classes)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"classes={classes!r:.60} was given. Give their number, from 1 on, or a list of their names.")
    return names


def known_classes(dataset: Any) -> tuple[str, ...]:
    """The names of the classes in the order of their labels; empty where the set, or the one in it, shows none."""
    return _names_in(dataset, "classes")


def differing_classes(trained: Any, evaluated: Any) -> str:
    """A sentence where a label is another class in the data set that is evaluated; empty where that is not known."""
    names, others = known_classes(trained), known_classes(evaluated)
    label = next((label for label, (one, two) in enumerate(zip(names, others)) if one != two), None)
    inner = [*_within(trained), *_within(evaluated)]
    if label is None or any(getattr(each, "target_transform", None) is not None for each in inner):
        return ""
    return (
        f"Label {label} is {names[label]!r} in the data set that is trained on, which has {len(names)} classes, and "
        f"{others[label]!r} in the one that is evaluated, which has {len(others)}: its loss and accuracy would be of "
        "other classes. Labels are numbered in the order of the class folders. Give both sets the same folders, or "
        "lockstep.data.ImageFolder the same classes=, or map labels by target_transform."
    )


def differing_columns(trained: Any, used: Any) -> str:
    """A sentence where a data set has other columns than the one that is trained on; empty where that is not known.

    Columns are known by ``feature_names`` of a data set or one in it.
    """
    columns, others = _names_in(trained, "feature_names"), _names_in(used, "feature_names")
    if not columns or not others or columns == others:
        return ""
    return (
        f"The columns of the data set that is trained on are {shorten(columns, 4)}, and here they are "
        f"{shorten(others, 4)}. The model tells them by their order. Name them for each data set: columns=[...]."
    )


def _names_in(dataset: Any, attribute: str) -> tuple[str, ...]:
    for each in _within(dataset):
        names = getattr(each, attribute, None)
        if isinstance(names, list | tuple) and names:
            return tuple(map(str, names))
    return ()


def _within(dataset: Any) -> Iterator[Any]:
    """A data set and those in it, the outermost first."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)
