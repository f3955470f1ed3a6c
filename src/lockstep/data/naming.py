"""Names a sample for people: its number, and its file where the data set knows it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np
from torch.utils.data import Subset

from lockstep.errors import DataError
from lockstep.permutation import Indices


def look_through(dataset: Any) -> tuple[Any, Indices | None]:
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
    inner, numbers = look_through(dataset)
    path = _path(inner, index if numbers is None else int(numbers[index]))
    return f"sample {index} ({path})" if path else f"sample {index}"


def sample_error(dataset: Any, index: int, error: BaseException) -> DataError:
    """The ``DataError`` for a sample whose reading raised ``error``."""
    found = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    name = sample_name(dataset, index)
    return DataError(f"S{name[1:]} cannot be read: {found}")


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
