"""Samples by number and file, as messages name them, and what is refused as a data set or as samples of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from lockstep.core.plan import Indices
from lockstep.errors import ConfigError, DataError
from lockstep.text import plural


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
