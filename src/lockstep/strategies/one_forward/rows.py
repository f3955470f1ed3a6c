"""Joins the inputs of several micro-batches into one, and splits the output back by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.errors import ConfigError


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One input from those of several micro-batches: tensors one below the other, all else as it is in each.

    Args:
        parts: nested tuples, lists and dicts, alike but for the values of tensors.
        sizes: samples of each micro-batch; every tensor has so many rows.

    Raises:
        ConfigError: the inputs do not fit together.
    """
    flattened = [tree_flatten(part) for part in parts]
    specs = [spec for _, spec in flattened]
    if any(spec != specs[0] for spec in specs):
        raise ConfigError(
            f"{_WHY} they must be alike. One is {specs[0]}, another {next(s for s in specs if s != specs[0])}."
        )
    columns = zip(*(leaves for leaves, _ in flattened))
    return tree_unflatten([_join_leaves(column, sizes) for column in columns], specs[0])


def split(output: Any, sizes: Sequence[int]) -> list[Any]:
    """The part of each micro-batch of an output whose tensors have a row for each sample.

    Raises:
        ConfigError: a tensor has another number of rows.
    """
    leaves, spec = tree_flatten(output)
    rows = sum(sizes)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != rows):
            raise ConfigError(
                f"With sync_batch_norm a model is called once with all {rows} samples that a process has of a step, "
                f"and its output has the shape {tuple(leaf.shape)}. Let it return a row for each sample, and compute "
                "the loss in the loss function."
            )
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves
    ]
    return [tree_unflatten(list(part), spec) for part in zip(*columns)]


_WHY = "With sync_batch_norm the inputs of a process's micro-batches are put into one, so"


def _join_leaves(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if any(isinstance(leaf, Tensor) or leaf != first for leaf in column):
            raise ConfigError(
                f"{_WHY} what is no tensor must be equal in all of them. Found {first!r} and others."
            )
        return first
    for leaf, size in zip(column, sizes):
        fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        if not fits or leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype:
            found = [f"{tuple(each.shape)}" if isinstance(each, Tensor) else repr(each) for each in column]
            raise ConfigError(
                f"{_WHY} their tensors must have a row for each sample and otherwise one shape; {list(sizes)} samples "
                f"have {', '.join(found)}. Let the collate function pad to one length, or leave sync_batch_norm out."
            )
    return first if len(column) == 1 else torch.cat(list(column))
