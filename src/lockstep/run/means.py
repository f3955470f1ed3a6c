"""Finds functions whose values are no means over samples, although they are taken for that.

A loss or metric that returns one number for a micro-batch stands for the mean over its samples, and the means of all
micro-batches are averaged. That is right for accuracy and cross-entropy, and wrong for a sum, for a mean over unmasked
tokens, for F1, and for a contrastive loss. The rows of one micro-batch tell them apart: a mean over all rows is the
weighted mean of those over two parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.data.keyed import generators_kept
from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.step import exact, sum_and_weight

_LARGEST_DIFFERENCE = {torch.float16: 0.03, torch.bfloat16: 0.1}
"""In relation to the values, by dtype of the outputs; rounding is far smaller than that."""


class Deviation(Enum):
    """What a function that is no mean over samples seems to be."""

    NONE = 0
    SUM = 1
    OTHER = 2

    @property
    def reason(self) -> str:
        """The text after "The metric 'f1' "; empty for ``NONE``."""
        return _REASONS.get(self, "")


_REASONS = {
    Deviation.SUM: (
        "is a sum over the samples of a micro-batch, and would be taken for their mean. Return a mean, one value per "
        "sample, or the pair (sum, number of samples)."
    ),
    Deviation.OTHER: (
        "is no mean over samples: the mean of its values over two parts of a micro-batch is not its value over the "
        "whole, so an average over micro-batches would be wrong. For a mean over something else, such as unmasked "
        "tokens, return the pair (sum, how many were counted)."
    ),
}


def checked(function: Callable[[Any, Any], Any], output: Any, target: Any, samples: int) -> Deviation:
    """See ``deviation``; what the user's own function changes, such as a list that it adds to, is put back."""
    with generators_kept():
        before = Snapshot({"the function": function})
        try:
            return deviation(exact(function), output, target, samples)
        finally:
            before.restore()


def deviation(function: Callable[[Any, Any], Any], output: Any, target: Any, samples: int) -> Deviation:
    """Compares the value of a function over all rows with those over two parts of them.

    Args:
        function: of (output, target), as ``Run.backward`` and ``Run.evaluate`` take it. It is called eight times.
        output, target: of one micro-batch.
        samples: how many rows.

    Returns:
        What is found. ``NONE`` also where rows cannot be told apart: a single row, tensors without a row for each
        sample, objects such as dataclasses, random numbers in the function, or an error over fewer rows.
    """
    everything = tree_leaves((output, target))
    leaves = [leaf for leaf in everything if isinstance(leaf, Tensor)]
    opaque = any(not isinstance(leaf, Tensor | int | float | str | bytes | None) for leaf in everything)
    if opaque or samples < 2 or any(leaf.dim() == 0 or len(leaf) != samples for leaf in leaves):
        return Deviation.NONE

    def sums(rows: slice) -> tuple[float, float]:
        cut = tree_map_only(Tensor, lambda leaf: leaf.detach()[rows], (output, target))
        total, weight = sum_and_weight(function(*cut), len(range(samples)[rows]))
        return float(total), float(weight)

    try:
        with torch.no_grad():
            whole, again = sums(slice(None)), sums(slice(None))
            borders = sorted({samples // 2, samples // 3, samples // 5} - {0})
            splits = [(sums(slice(border)), sums(slice(border, None))) for border in borders]
    except Exception:  # it may need a certain number of rows
        return Deviation.NONE
    if whole != again:
        return Deviation.NONE
    most = max((_LARGEST_DIFFERENCE.get(leaf.dtype, 3e-5) for leaf in leaves), default=3e-5)
    found = {_deviation(whole, *split, most) for split in splits} - {Deviation.NONE}
    return found.pop() if len(found) == 1 else Deviation.OTHER if found else Deviation.NONE


_Sums = tuple[float, float]
"""Sum and weight over some rows."""


def _deviation(whole: _Sums, first: _Sums, second: _Sums, most: float) -> Deviation:
    if not all(map(math.isfinite, whole)):
        return Deviation.NONE
    if not all(map(math.isfinite, (*first, *second))):  # as where a part has nothing that is counted
        return Deviation.OTHER
    if all(_adds_up(*three, most) for three in zip(whole, first, second)):
        return Deviation.NONE
    value, one, other = (total / weight if weight else 0.0 for total, weight in (whole, first, second))
    return Deviation.SUM if _adds_up(value, one, other, most) else Deviation.OTHER


def _adds_up(whole: float, first: float, second: float, most: float) -> bool:
    return abs(whole - first - second) <= most * (abs(whole) + abs(first) + abs(second))
