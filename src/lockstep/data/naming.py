"""Samples as people see them: their number and file, their labels, and the split that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from pathlib import PurePath
from traceback import walk_tb
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.core.plan import Indices
from lockstep.core.seeding import derive_seed
from lockstep.errors import ConfigError, DataError
from lockstep.text import plural, shorten


def unwrap_subset(dataset: Any) -> tuple[Any, Indices | None]:
    """The data set under any number of ``Subset``, and the numbers that the outermost one selects of it."""
    numbers: Indices | None = None
    while type(dataset) is Subset:
        inner = np.asarray(dataset.indices, dtype=np.int64)
        numbers = inner if numbers is None else inner[numbers]
        dataset = dataset.dataset
    return dataset, numbers


def sample_name(dataset: Any, index: int) -> str:
    """``sample 12 (roses/x.jpg)``, or ``sample 12`` where no file is known.

    A file is known if the set has a method ``sample_path(index)``, or a list ``samples`` or ``imgs`` of pairs
    that begin with the path, as torchvision's folders do. ``Subset`` is looked through.
    """
    path = path_of(dataset, index)
    return f"sample {index} ({path})" if path else f"sample {index}"


def path_of(dataset: Any, index: int) -> str:
    """The file that a sample is in, as ``sample_name`` shows it; empty where no file is known."""
    inner, numbers = unwrap_subset(dataset)
    return _path(inner, index if numbers is None else int(numbers[index]))


def sample_error(dataset: Any, index: int, error: BaseException) -> DataError:
    """The ``DataError`` for a sample whose reading raised ``error``."""
    found = str(error) if isinstance(error, DataError) else error_text(error)
    name = sample_name(dataset, index)
    return DataError(f"S{name[1:]} cannot be read: {found}")


def error_text(error: BaseException) -> str:
    """An error of user code, with what to do where it is torch's about CUDA in a loader process."""
    places = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    of_fork = places[-1:] == ["torch.cuda"] and torch.cuda._is_in_bad_fork()
    remedy = " Lockstep moves batches to the GPU: give tensors on the CPU here, or leave out the workers."
    return f"{type(error).__name__}: {error}{remedy if of_fork else ''}"


_NUMBERS = np.generic | float | int
_COLLATABLE = (torch.Tensor, np.ndarray, np.generic, float, int, str, bytes, Mapping, Sequence)
_OWN_COLLATE = "or a collate function that {}: run.batches(DataLoader(dataset, collate_fn=...))."


def why_uncollatable(names: Sequence[str], samples: Sequence[Any], place: str = "") -> str:
    """A sentence on why torch cannot make one batch of samples, and what to do; empty where that is not known.

    Args:
        names: of the samples.
        samples: values at the same place of each sample.
        place: in the sample, such as ``[1]['mask']``; empty for all of it.
    """
    where = f" at {place}" if place else ""
    for name, value in zip(names, samples):
        if value is None:
            remedy = _OWN_COLLATE.format("leaves it out")
            return f"{name} is None{where}. Give a tensor or a number there, {remedy}"
        if not isinstance(value, _COLLATABLE):
            found = f"{type(value).__module__}.{type(value).__qualname__}"
            kept = ", or keep it as it is: run.batches(DataLoader(dataset, collate_fn=list))"
            how = " with a transform such as torchvision.transforms.ToTensor()" if "PIL." in found else kept
            return f"{name} is a {found}{where}. Make it a tensor{how}."
    forms = list(map(_form, samples))
    for name, form in zip(names, forms):
        if form != forms[0]:
            arrays = isinstance(samples[0], torch.Tensor | np.ndarray)
            even = "a transform that makes all samples of one shape" if arrays else "the same for every sample"
            remedy = f"Give {even}, {_OWN_COLLATE.format('pads them')}"
            return f"{names[0]} is {forms[0]}{where}, and {name} is {form}. {remedy}"
    first = samples[0]
    keys: Iterable[Any] = ()
    if isinstance(first, Mapping):
        keys = first
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        keys = range(len(first))
    inner = (why_uncollatable(names, [each[key] for each in samples], f"{place}[{key!r}]") for key in keys)
    return next((found for found in inner if found), "")


def _form(value: Any) -> str:
    """The form that has to be equal in all samples of a batch."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"of shape {tuple(value.shape)}"
    if isinstance(value, _NUMBERS):
        return "a number"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, str | bytes):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of {plural(len(value), 'value')}"


def _path(dataset: Any, index: int) -> str:
    give = getattr(dataset, "sample_path", None)
    if callable(give):
        return str(give(index))
    for name in ("samples", "imgs"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, list) and index < len(listed):
            entry = listed[index]
            if isinstance(entry, tuple) and entry and isinstance(entry[0], (str, PurePath)):
                return _short(dataset, str(entry[0]))
    return ""


def _short(dataset: Any, path: str) -> str:
    root = getattr(dataset, "root", None)
    if isinstance(root, (str, PurePath)) and PurePath(path).is_relative_to(root):
        return str(PurePath(path).relative_to(root))
    return path


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


def require_map_style(dataset: Any, user: str) -> None:
    """Raises a ``ConfigError`` for data without ``__len__`` or ``__getitem__``, in the name of its user.

    So it does for what has both and is not a data set: a path, a dict of data sets, a tuple of tensors.
    """
    if isinstance(dataset, type):
        raise ConfigError(f"{user} was given the class {dataset.__name__}. Create a data set: {dataset.__name__}(...).")
    if isinstance(dataset, str | bytes | PurePath):
        raise ConfigError(
            f"{user} was given the path {str(dataset)!r}, not a data set. Open it first, for example with "
            "lockstep.data.ImageFolder(path)."
        )
    if isinstance(dataset, Mapping) and not hasattr(dataset, "__getitems__"):  # which a TensorDict has
        raise ConfigError(
            f"{user} was given a {type(dataset).__name__} with the keys {', '.join(map(repr, list(dataset)[:6]))}, "
            "whose entries have no numbers. Give one of its values if they are data sets; of columns make a set: "
            "torch.utils.data.TensorDataset(inputs, targets)."
        )
    if isinstance(dataset, tuple) and all(isinstance(each, torch.Tensor | np.ndarray) for each in dataset):
        raise ConfigError(
            f"{user} was given a tuple of {plural(len(dataset), 'array')}, which would be its samples. Make a data "
            "set of their rows: torch.utils.data.TensorDataset(inputs, targets)."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"{user} was given a {type(dataset).__name__}, which has no __len__ or no __getitem__. "
            "Give a map-style data set with __len__ and __getitem__(index), or a DataLoader of one, whose collate_fn "
            "makes the batches; of a stream, lockstep.data.Stream(dataset, samples=N). Put tqdm or enumerate around "
            "run.batches(...)."
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


def held_out(names: Sequence[str], fraction: float, seed: int, what: str) -> set[str]:
    """The names that are for validation: the ``fraction`` with the smallest keys ``(seed, name)``, rounded.

    At least one is held out and at least one is left; ``what`` names the group in the error that says it is too small.
    A name's key depends on no other name, so a few files more or less move few others.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"A held-out fraction of {fraction:g} was asked for; it must lie between 0 and 1.")
    if len(names) < 2:
        raise DataError(
            f"{what} has {plural(len(names), 'sample')}, "
            "too few to train on some and hold out others. It needs at least 2."
        )
    count = min(max(1, round(len(names) * fraction)), len(names) - 1)
    return set(sorted(names, key=lambda name: (derive_seed(seed, "split", name), name))[:count])
