"""Cuts the data of micro-batches into rows, one for each sample, and puts rows together."""

from __future__ import annotations

import itertools
from collections import UserList
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

from lockstep.data.batch import MicroBatch, map_leaves, tensors_in

MOST_JOINED = 8
"""Micro-batches of one row that are put together."""
RowCopies = tuple[Any, Any, int]
"""Copies of output and target of a micro-batch, into which a function may write, and how many rows it has."""


def together(micro_batches: Sequence[MicroBatch], least: int = 2) -> tuple[Any, int]:
    """The data of the first micro-batch, or of some with fewer rows than ``least``, and how many rows they have."""
    parts = micro_batches[: 1 if len(micro_batches[0]) >= least else MOST_JOINED]
    columns = [with_columns(each.data, len(each)) if len(each) > 1 else each.data for each in parts]
    whole = iter(joined(list(map(leaves_of, columns))))
    return map_leaves(columns[0], lambda _: next(whole)), sum(map(len, parts))


def with_columns(data: Any, samples: int) -> Any:
    """The data, in which a list with an entry for each sample, such as lengths, is one leaf."""

    def column(value: Any) -> Any:
        is_list = type(value) in (list, tuple) and len(value) == samples
        are_alike = is_list and len({tuple(each) if isinstance(each, dict) else None for each in value} - {None}) == 1
        has_columns = any(has_rows(tensor, samples) for tensor in tensors_in(value))
        return UserList(value) if is_list and (are_alike or not has_columns) else value

    if type(data) is dict:
        return {name: column(value) for name, value in data.items()}
    return type(data)(map(column, data)) if type(data) in (list, tuple) else data


def leaves_of(data: Any) -> list[Any]:
    """The leaves of a micro-batch's data, as ``map_leaves`` finds them."""
    found: list[Any] = []
    map_leaves(data, found.append)
    return found


def has_rows(data: Any, samples: int) -> bool:
    """True if every tensor in nested data has a row for each sample, and nothing in it may hide more tensors."""
    leaves = tree_leaves(data)
    return all(
        leaf.dim() > 0 and not leaf.is_nested and len(leaf) == samples
        if isinstance(leaf, Tensor)
        else isinstance(leaf, int | float | str | bytes | UserList | None)
        for leaf in leaves
    )


def rows_of(data: Any, rows: slice) -> Any:
    """Copies of some rows of each tensor in the data, which a function may write into."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach()[rows].clone(), data)


def own_rows(data: Any, rows: slice | list[int]) -> Any:
    """The data of a micro-batch with copies of some rows of its tensors, which a model may write into."""

    def some(leaf: Any) -> Any:
        if isinstance(leaf, UserList):
            entries = leaf.data[rows] if isinstance(rows, slice) else type(leaf.data)(leaf.data[row] for row in rows)
            return tree_map_only(Tensor, Tensor.clone, entries)
        return leaf[rows].clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(data, some)


def copies_of(data: Any) -> Any:
    """Copies of the tensors in the data; without their graphs."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), data)


def joined(parts: Sequence[Any]) -> Any:
    """The data with the rows of all parts, which are alike; ``ValueError`` or an error of torch where they are not."""
    columns = zip(*(tree_leaves(part) for part in parts), strict=True)
    rows = [
        UserList(itertools.chain(*leaves))
        if isinstance(leaves[0], UserList)
        else (torch.cat([*leaves]) if isinstance(leaves[0], Tensor) else leaves[0])
        for leaves in columns
    ]
    return tree_unflatten(rows, tree_structure(parts[0]))
