"""Values of a table's cells, as a model or a loss wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import DataError


def as_value(cell: Any) -> Any:
    """Numbers and lists of numbers as tensors (float32, or int64 of whole numbers); anything else as it is.

    ``DataError`` for an empty cell or a list of unequal lists.
    """
    if cell is None:
        raise DataError("the cell is empty")
    if isinstance(cell, (bool, int, float, list)):
        try:
            array = np.asarray(cell)
        except ValueError as error:
            raise DataError(f"the cell's lists are of unequal lengths: {error}") from error
        if array.dtype.kind in "iub":
            return torch.from_numpy(np.atleast_1d(array).astype(np.int64)).reshape(array.shape)
        if array.dtype.kind == "f":
            return torch.from_numpy(np.atleast_1d(array).astype(np.float32)).reshape(array.shape)
        if array.dtype == object and _holds_none(cell):
            raise DataError("the cell's list has an empty place")
    return cell


def as_number(cell: Any) -> Any:
    """A target: a number stays a Python number, which torch collates; see ``as_value`` for lists."""
    return cell if isinstance(cell, (bool, int, float)) else as_value(cell)


def whole_numbers(column: Any, where: str) -> npt.NDArray[np.int64]:
    """A column of labels as int64; ``DataError`` where a cell is empty or no whole number."""
    try:
        values = np.asarray(column)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} cannot be read as labels: {error}") from error
    if values.dtype.kind not in "iu" or values.ndim != 1:
        found = "has empty cells" if getattr(column, "null_count", 0) else f"holds {values.dtype}"
        raise DataError(f"{where} {found}; with classes every target is one whole number.")
    return values.astype(np.int64)


def _holds_none(cell: Any) -> bool:
    return any(_holds_none(each) for each in cell) if isinstance(cell, list) else cell is None
