"""Several micro-batches that are read in one go, and cut apart afterwards.

    micro-batches of a step  |-- k0 --|-- k1 --|-- k2 --|     three reads of few rows: three times the calls
    read together            |---------- rows ----------|     one read, and each micro-batch is a view of its rows

That is right only where every row follows from its own number and key. A set says so with ``rows_alone = True`` in the
class that defines ``get_batch``; one that overrides the method, to mix rows for example, has to say it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.alignment import ALIGNMENT, aligned
from lockstep.data.pinning import pinned


@dataclass(frozen=True)
class Together:
    """Micro-batches as they were read."""

    data: Any
    """The rows of all of them, or a list of them."""
    sizes: tuple[int, ...] | None
    """Rows of each, where they are still to be cut apart."""

    def map(self, change: Callable[[Any], Any]) -> Together:
        """The same with all data changed."""
        return Together(change(self.data), self.sizes)

    def pin_memory(self) -> Together:
        """The same in page-locked memory; torch's ``DataLoader`` asks for it under this name."""
        return self.map(pinned)

    def apart(self) -> Sequence[Any]:
        """The data of each micro-batch, aligned; views of the same memory where they were read as one."""
        return aligned(self.data) if self.sizes is None else split_rows(self.data, self.sizes)


def rows_alone(dataset: Any) -> bool:
    """Whether each row that ``get_batch`` gives follows from its own number and key alone, in strided tensors."""
    for cls in type(dataset).__mro__:
        if "get_batch" in vars(cls):
            return bool(vars(cls).get("rows_alone", False))
    return False


def split_rows(data: Any, sizes: tuple[int, ...]) -> Sequence[Any]:
    """Data in tuples, lists and dicts of any depth, whose tensors are cut into so many rows each, aligned.

    The parts of a tensor share memory and nothing else: one may be changed in place between another's forward and
    backward pass, which with ordinary views would be an error.
    """
    if isinstance(data, Tensor):
        parts = torch.unsafe_split_with_sizes(data, sizes)
        fit = data.data_ptr() % ALIGNMENT == 0 and not any(
            size * data.stride(0) * data.itemsize % ALIGNMENT for size in set(sizes[:-1])
        )
        return parts if fit else aligned(parts)
    if isinstance(data, dict):
        values = [split_rows(value, sizes) for value in data.values()]
        return [dict(zip(data, part, strict=True)) for part in zip(*values, strict=True)]
    values = [split_rows(value, sizes) for value in data]
    make = type(data)._make if hasattr(data, "_fields") else type(data)
    return [make(part) for part in zip(*values, strict=True)]
