"""Finds functions whose values are not means over samples, although they are taken for that.

A loss or metric that returns one number for a micro-batch stands for the mean over its samples, and the means of all
micro-batches are averaged. That is right for accuracy and cross-entropy, and wrong for a sum, for a mean over unmasked
tokens, for F1, and for a contrastive loss. The rows of one micro-batch tell them apart: a mean over all rows is the
weighted mean of those over two parts.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

from lockstep.core.generators import generators_kept
from lockstep.data.batch import MicroBatch, tensors_in
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import uncompiled
from lockstep.numerics.hidden_state import Snapshot, told
from lockstep.run.checks.rows import (
    MOST_JOINED,
    RowCopies,
    copies_of,
    has_rows,
    joined,
    leaves_of,
    own_rows,
    rows_of,
    together,
    with_columns,
)
from lockstep.run.step import sum_and_weight, with_exact_mean
from lockstep.run.step_errors import computes_gradients

logger = logging.getLogger(__name__)
_LARGEST_DIFFERENCE = {torch.float16: 0.03, torch.bfloat16: 0.1}
"""In relation to the values, by dtype of these or the outputs; rounding is far smaller than that."""
_MOST_OF_GRADIENT = {torch.float16: 0.03, torch.bfloat16: 0.03}
"""The same of gradients, by dtype of the outputs."""

_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MOST_SENT, _MOST_NUMBERS = 16, 4_096
"""Rows of an evaluation that each process gives to the others, and numbers in them."""
_Function = Callable[[float], float]
Sums = tuple[float, float]
"""Sum and weight over some rows."""


class Deviation(Enum):
    """The kinds of functions that are not means over samples, and the text after "The metric 'f1' " for each."""

    NONE = ""
    """Nothing is found, or rows cannot be distinguished; the function is not looked at again."""
    SUM = (
        "is a sum over the samples of a micro-batch, and would be taken for their mean. Return a mean, one value per "
        "sample, or the pair (sum, number of samples)."
    )
    WEIGHTED = (
        "is not a mean over samples, but one over something else, such as unmasked tokens: samples of one micro-batch "
        "would count more than those of another. Return the pair (sum, how many were counted)."
    )
    FUNCTION = (
        "is not a mean over samples, but the root or the exponential of one. Return the mean, and apply sqrt or exp to "
        "what run.backward or run.evaluate returns."
    )
    OTHER = (
        "is not a mean over samples: the mean of its values over two parts of a micro-batch is not its value over the "
        "whole, so an average over micro-batches would be wrong. For a mean over something else, such as unmasked "
        "tokens, return the pair (sum, how many were counted). A loss that compares the samples of a batch with each "
        "other needs run.backward(batch, loss, whole_batch=True)."
    )
    ONE_ENTRY = (
        "returns a tensor with one dimension and one entry for all samples of a micro-batch, and an entry counts as "
        "one sample. For the mean over the samples return a tensor without dimensions, such as value.squeeze()."
    )
    UNKNOWN = (
        "fails for a part of a micro-batch, so whether it is a mean over samples is not known. If it compares "
        "the samples of a batch with each other, use run.backward(batch, loss, whole_batch=True)."
    )
    UNCLEAR = None
    """All values were one number so far, such as 0, or none; it is looked at again."""
    PAIR = (
        "returns a pair, which stands for (sum, how many were counted), and these do not add up over samples. One that "
        "compares the samples of a batch needs whole_batch=True."
    )
    NO_SUM = (
        "returns a pair, which stands for (sum, how many were counted). The first is a mean already, or the second no "
        "count, such as an accuracy. Return the sum, and numbers beside a loss by also= of run.backward."
    )
    GRADIENT = (
        "is a mean over samples by its value, and not by its gradient: that of an output is another one where other "
        "samples are left out, as where terms are weighted by their own values, a + b * (a / b).detach(). Compute such "
        "weights in the loop, from what run.backward has returned before, or use run.backward(batch, loss, "
        "whole_batch=True). For a mean over unmasked tokens return the pair (sum, how many were counted)."
    )
    KEPT = (
        "is a mean over samples by what the model returns, and not together with what else the forward pass leaves for "
        "it, such as a balance of experts in an attribute: each micro-batch has its own. Return from the model what "
        "that term is computed from, and use run.backward(batch, loss, whole_batch=True). If it is a sum, take the "
        "mean."
    )
    STATEFUL = (
        "has another value for the same rows after a call for others: it keeps something, and each process calls it "
        "for its own micro-batches. Return the value for the rows that it is given, and take a moving average in the "
        "loop, of what run.backward or run.evaluate returns."
    )
    UNTESTED = (
        "is of data without an entry for each sample, such as graphs joined to one, so whether it is a mean over "
        "samples is not known. Return a mean over nodes, boxes or tokens as the pair (sum, how many were counted)."
    )
    LENGTHS = (
        "is one number for each micro-batch, of a single sample, and samples have several lengths, so whether it is to "
        "be a mean over samples or over tokens is not known. Return loss.view(1), a value for each sample, or for a "
        "mean over tokens the pair (sum, how many were counted)."
    )
    WITHOUT_ROWS = (
        "was given outputs without several rows, one for each sample, or computes gradients itself, so whether it is a "
        "mean over samples is not known. Only a first step or evaluation under a strategy that holds the whole model, "
        "without sync_batch_norm, runs it on parts of a micro-batch to find out. Return a mean over unmasked tokens as "
        "the pair (sum, how many were counted)."
    )

    @property
    def reason(self) -> str:
        """The text; empty for ``NONE`` and ``UNCLEAR``."""
        return self.value or ""


UNTOLD = {each.reason for each in (Deviation.UNKNOWN, Deviation.UNTESTED, Deviation.LENGTHS, Deviation.WITHOUT_ROWS)}
"""Of those of which a warning tells: they may be means or not."""


def checked(
    function: Callable[[Any, Any], Any],
    output: Any,
    target: Any,
    samples: int,
    *,
    trains: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> Deviation:
    """See ``deviation``; what the user's own function changes, such as a list that it adds to, is restored.

    ``trains``: the function is a loss, whose gradients are compared, too; ``begin`` is called before each call of it.
    """

    def mean(output: Any, target: Any) -> Any:
        begin()
        return with_exact_mean(function)(output, target)

    def values(rows: slice) -> str:  # a call draws the same random numbers as the others
        with generators_kept(), torch.no_grad():
            return repr([each.tolist() for each in tensors_in(mean(*rows_of((output, target), rows)))])

    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as torch's of the deviation of a single row
        before = Snapshot({"the function": function})
        try:
            found = deviation(mean, output, target, samples)
            if before.changed(Snapshot({"the function": function}, restorable=False)):
                before.restore()
                with suppress(Exception):
                    alone = values(slice(None))
                    before.restore()
                    for some in sorted({samples // 2, samples // 3 or 1, 1}):  # of which one has another value
                        with suppress(Exception):
                            values(slice(some))
                    if values(slice(None)) != alone:
                        return Deviation.STATEFUL
            if trains and not found.reason and _has_other_gradients(mean, output, target, samples):
                return Deviation.GRADIENT
            return found
        finally:
            before.restore()


def _has_other_gradients(function: Callable[[Any, Any], Any], output: Any, target: Any, samples: int) -> bool:
    """True if the gradient of a sum of losses, of rows of the output, is another one where the others are left out."""

    def gradients(rows: slice, scale: float = 1.0) -> list[Tensor]:
        given, rest = rows_of((output, target), rows)
        leaves = [leaf.requires_grad_() for leaf in tensors_in(given) if leaf.is_floating_point()]
        with torch.enable_grad():
            value = function(tree_map_only(Tensor, Tensor.clone, given), rest)
            total, _ = sum_and_weight(value, len(range(samples)[rows]))
        return [each / scale for each in gradients_of(total * scale, leaves)]  # grad_outputs= of torch imports sympy

    if samples < 2 or not has_rows((output, target), samples):
        return False
    with suppress(Exception):  # a loss without a gradient is told elsewhere
        half = samples // 2
        whole, again = gradients(slice(None)), gradients(slice(None), 3.0)
        most = max(_MOST_OF_GRADIENT.get(leaf.dtype, 1e-3) for leaf in whole)
        if not are_apart(whole, again, most):  # otherwise they are random, or rounding alone
            parts = zip(gradients(slice(half)), gradients(slice(half, None)), strict=True)
            return are_apart(whole, [torch.cat(pair) for pair in parts], most)
    return False


def gradients_of(total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a number with respect to some tensors; zeros for those that it does not depend on."""
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(each) if g is None else g for each, g in zip(inputs, found, strict=True)]


def are_apart(whole: Sequence[Tensor], parts: Sequence[Tensor], most: float) -> bool:
    """True if gradients differ by more than ``most`` of all of them together, which leaves out those of rounding."""
    return norm_of([one - other for one, other in zip(whole, parts, strict=True)]) > most * norm_of(whole)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of some tensors together."""
    return math.hypot(*(float(each.norm()) for each in tensors))


def _together(parts: Sequence[RowCopies]) -> RowCopies:
    """The rows of all parts; an error where they are not alike, as when micro-batches have several lengths."""
    return *joined([part[:2] for part in parts]), sum(part[2] for part in parts)


def reasons(functions: Mapping[str, Callable[[Any, Any], Any]], parts: Sequence[RowCopies]) -> dict[str, str]:
    """Why functions are not means over samples, or may not be, by name; without those that nothing tells of yet.

    ``parts`` are the micro-batches of a process so far. Where they have one row each, they are put together.
    """
    part = parts[-1]
    if part[2] < 2:
        try:
            part = _together(parts)
        except Exception:
            return {}
    found = {name: checked(function, *part) for name, function in functions.items()}
    return {name: each.reason for name, each in found.items() if each is not Deviation.UNCLEAR}


def reasons_with_model(
    functions: Mapping[str, Callable[[Any, Any], Any]],
    forward: Callable[[Any, int], tuple[Any, Any]],
    micro_batches: Sequence[MicroBatch],
    device: torch.device,
) -> dict[str, str]:
    """See ``reasons``; where outputs have no row for each sample, see ``deviation_with_model``."""
    found = {}
    with generators_kept():
        with suppress(Exception):
            data, samples = together(micro_batches)
            if has_rows(forward(own_rows(data, slice(None)), 0), samples):
                return {}
        for name, function in functions.items():
            before = Snapshot({name: function})
            with suppress(Exception):
                found[name] = deviation_with_model(with_exact_mean(function), forward, micro_batches, device)
            before.restore()
    return {name: each.reason for name, each in found.items() if each is not Deviation.UNCLEAR}


class RowSample:
    """Rows from up to eight micro-batches of one evaluation, on which its metrics are checked.

    Rows of the whole set, at every evaluation: the recall of a class is 0 over any rows, as if it were a mean, while a
    model never says that class, or where the set is sorted by them.
    """

    def __init__(self, micro_batches: int, size: int) -> None:
        self._apart = max(1, -(-micro_batches // MOST_JOINED))
        self._rows = -(-max(64, 2 * size) * self._apart // max(1, micro_batches))
        self._parts: list[RowCopies] = []
        self._left = 1 << 24

    def take(self, place: int, pair: Any, samples: int) -> None:
        """Copies rows of (output, target) of this process's micro-batch number ``place``, if it is one of those."""
        if not has_rows(pair, samples):  # a count is known to be no mean nevertheless
            self._parts += [] if self._parts else [(*copies_of(pair), samples)]
        elif place % self._apart == 0 and self._left > 0:
            output, target = rows_of(pair, slice(self._rows))
            self._parts.append((output, target, min(samples, self._rows)))
            self._left -= sum(tensor.numel() for tensor in tensors_in(output))

    def some(self) -> list[Any]:
        """The leaves of some of the rows as lists, for the other processes; none where they are large."""
        with suppress(Exception):
            *pair, samples = _together(self._parts)
            step = max(1, samples // _MOST_SENT)
            leaves = tree_leaves(rows_of(pair, slice(0, step * _MOST_SENT, step)))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if has_rows(pair, samples) and sum(leaf.numel() for leaf in tensors) <= _MOST_NUMBERS:
                return [leaf.tolist() if isinstance(leaf, Tensor) else None for leaf in leaves]
        return []

    def reasons(
        self, functions: Mapping[str, Callable[[Any, Any], Any]], everyone: Sequence[list[Any]] = ()
    ) -> dict[str, str]:
        """See ``reasons``. ``everyone``: what ``some`` gave on each process.

        A process may have a single row, or those of one class.
        """
        parts = list(self._parts)
        with suppress(Exception):
            whole = _together(parts)
            parts = [parts[0], *([whole] if len(parts) > 1 else [])]
            leaves, others = tree_leaves(whole[:2]), [given for given in everyone if given]
            if len(others) > 1:
                rows = [_rows_like(leaf, column) for leaf, column in zip(leaves, zip(*others), strict=True)]
                both = tree_unflatten(rows, tree_structure(whole[:2]))
                parts.append((*both, next(len(each) for each in rows if isinstance(each, Tensor))))
        return {name: why for part in parts for name, why in reasons(functions, [part]).items() if why}


def _rows_like(leaf: Any, parts: Sequence[Any]) -> Any:
    """A tensor of the rows of all parts, of the type and on the device of ``leaf``; else ``leaf``."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.tensor([row for part in parts for row in part], dtype=leaf.dtype, device=leaf.device)


Changes = dict[str, tuple[str, str]]
"""Places that a call has changed, with their texts before and after."""


def held_by(functions: Mapping[str, Callable[[Any, Any], Any]], names: Iterable[str]) -> Snapshot:
    """The state that some metrics hold now, to be compared with that after a call."""
    return Snapshot({f"the metric {name!r}": functions[name] for name in names}, restorable=False)


def judge_metrics(everyone: Sequence[tuple[Mapping[str, str], Changes]], *, warns: bool) -> set[str]:
    """Refuses metrics that are not means; warns of metrics with state that are called on several ranks.

    Args:
        everyone: of each rank the ``reasons``, and what metrics have changed.

    Returns:
        The names of those that need not be looked at again.

    Raises:
        ConfigError: a process has found that a metric is not a mean.
    """
    whys = {(name, why) for found, _ in everyone for name, why in found.items() if why}
    for name, reason in sorted(whys, key=repr):
        if reason in UNTOLD:
            if warns:
                logger.warning("The metric %r %s", name, reason)
            continue
        raise ConfigError(
            f"The metric {name!r} {reason} For a number of all samples together, such as F1, give run.evaluate an "
            "object with update(output, target), compute() and reset(), as torchmetrics has them, or compute it from "
            "run.predict. checks='off' takes the average over micro-batches all the same."
        )
    changed = {name: pair for _, kept in everyone for name, pair in kept.items()}
    if changed and warns and len(everyone) > 1:
        logger.warning(
            "A metric changes %s. The mean that it gives is right, but what it keeps is of one rank's samples, and so "
            "depends on the number of processes. Return it from the function, one value or row for each sample, or "
            "give run.evaluate an object with update(output, target), compute() and reset().",
            told(changed, 3),
        )
    return {name for found, _ in everyone for name in found}


def deviation(function: Callable[[Any, Any], Any], output: Any, target: Any, samples: int) -> Deviation:
    """Compares the value of a function over all rows with those over two parts of them.

    Args:
        function: of (output, target), as ``Run.backward`` and ``Run.evaluate`` take it.

    Returns:
        What is found. No rows are distinguished where there is a single one, for tensors without a row for each sample
        (if the value is not a count), objects such as dataclasses, random numbers in the function, and an error over
        fewer rows.
    """
    if not has_rows((output, target), samples):
        value = None
        with suppress(Exception):  # it is called again, and its error told
            value = function(output, target) if samples > 1 else None
        is_count = isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _WHOLE_NUMBERS
        return Deviation.SUM if is_count else Deviation.NONE

    have_one_entry: list[bool] = []
    are_pairs: list[bool] = []
    dtypes = {tensor.dtype for tensor in tensors_in((output, target))}
    takes_gradients = False

    def sums(rows: slice, *, turned: bool = False) -> Sums:
        def given(leaf: Tensor) -> Tensor:
            leaf = leaf.flip(0) if turned else leaf
            return leaf.requires_grad_().clone() if takes_gradients and leaf.is_floating_point() else leaf

        with torch.set_grad_enabled(takes_gradients):
            value = function(*tree_map_only(Tensor, given, rows_of((output, target), rows)))
        have_one_entry.append(isinstance(value, Tensor) and value.dim() > 0 and value.numel() == 1)
        are_pairs.append(isinstance(value, tuple))
        dtypes.update(tensor.dtype for tensor in tensors_in(value))
        total, weight = sum_and_weight(value, len(range(samples)[rows]))
        return float(total.detach()), float(weight)

    try:
        with torch.no_grad():
            sums(slice(None))  # its values may be rounded more than what it was given
    except Exception:
        takes_gradients = True  # as for a penalty that the loss computes from them
    most = max((_LARGEST_DIFFERENCE.get(dtype, 3e-5) for dtype in dtypes), default=3e-5)
    found = deviation_over(sums, samples, most)
    with suppress(Exception), torch.no_grad():
        if found.reason:
            (value, count), (other, weight) = sums(slice(None)), sums(slice(None), turned=True)
            if not _adds_up(value / count, other / weight, 0.0, most):
                return Deviation.UNTESTED  # as many boxes as samples, each with the number of its own
    if not found.reason or not are_pairs:  # or no call has succeeded
        return found
    if not all(are_pairs):
        return Deviation.ONE_ENTRY if all(have_one_entry) else found
    return Deviation.NO_SUM if _is_no_sum(sums, samples, most) else Deviation.PAIR


def _is_no_sum(sums: Callable[[slice], Sums], samples: int, most: float) -> bool:
    """True if the first of a pair is a mean, or the second no count."""
    with suppress(Exception), torch.no_grad():
        rows = slice(None), slice(samples // 2), slice(samples // 2, None)
        (whole, count), (one, first), (other, second) = map(sums, rows)
        return _adds_up(whole * count, one * first, other * second, most) or not _adds_up(count, first, second, most)
    return False


def deviation_over(sums: Callable[[slice], Sums], samples: int, most: float) -> Deviation:
    """See ``deviation``.

    Args:
        sums: gives sum and weight over some of the rows. It is called eight times, and ten more if something is found.
        most: the largest difference that is taken for rounding, in relation to the values.
    """
    if samples < 2:
        return Deviation.NONE
    borders = sorted({samples // 2, samples // 3, samples // 5} - {0})
    splits = []
    with torch.no_grad():
        try:
            whole, again = sums(slice(None)), sums(slice(None))
        except Exception as error:  # a model may give its loss only in training mode
            return Deviation.WITHOUT_ROWS if computes_gradients(error) else Deviation.NONE
        for border in borders:
            with suppress(Exception):  # it may need a certain number of rows
                splits.append((sums(slice(border)), sums(slice(border, None))))
    if not all(map(math.isfinite, whole)):
        return Deviation.UNCLEAR
    if whole != again:
        return Deviation.NONE
    if not splits:  # output.squeeze() of one row has a dimension less
        return Deviation.UNKNOWN if samples > 3 else Deviation.NONE
    found = {deviation_of_parts(whole, *split, most) for split in splits} - {Deviation.NONE}
    if found == {Deviation.SUM} and all(0 in (one[0], other[0]) for one, other in splits):
        found = {Deviation.OTHER}  # a mean over what is in only one of the parts looks like a sum
    if Deviation.OTHER not in found and len(found) <= 1:
        values = {total / weight if weight else 0.0 for total, weight in (whole, *itertools.chain(*splits))}
        return found.pop() if found else Deviation.UNCLEAR if len(values) == 1 else Deviation.NONE
    for inverse, function in ((lambda value: math.sqrt(value) ** 4, math.sqrt), (math.log, math.exp)):
        with suppress(ValueError, ArithmeticError):  # no root, no logarithm, or no weight
            if _gap(whole, splits, inverse, function) < 0.1 * _gap(whole, splits):
                return Deviation.FUNCTION
    return Deviation.WEIGHTED if _has_weights(sums, samples) else Deviation.OTHER


def _gap(
    whole: Sums, splits: Sequence[tuple[Sums, Sums]], inverse: _Function = float, function: _Function = float
) -> float:
    """How far values over two parts are from the whole, if they are a function of means over samples."""
    values = [
        function(sum(inverse(total / weight) * weight for total, weight in split if weight) / whole[1])
        for split in splits
    ]
    return sum(abs(value - whole[0] / whole[1]) for value in values)


def _has_weights(sums: Callable[[slice], Sums], samples: int) -> bool:
    """True if some weights of four parts explain the values over all runs of them.

    The value over two neighbours gives the weight of one in relation to the other; those over three and four must
    follow from these.
    """
    borders = [samples * part // 4 for part in range(5)]
    runs = [(i, j) for i in range(4) for j in range(i + 1, 5)]
    try:
        with torch.no_grad():
            found = {(i, j): sums(slice(borders[i], borders[j])) for i, j in runs}
    except Exception:  # as in deviation_over
        return False
    value = {run: total / weight if weight else math.nan for run, (total, weight) in found.items()}
    weights = [1.0]
    for i in range(3):
        one, both, other = value[i, i + 1], value[i, i + 2], value[i + 1, i + 2]
        weights.append(weights[-1] * (one - both) / (both - other) if both != other else math.nan)
    if not all(0 < weight < math.inf for weight in weights):
        return False

    def gap(run: tuple[int, int], counts: Sequence[float]) -> float:
        parts = range(*run)
        mean = sum(counts[i] * value[i, i + 1] for i in parts) / sum(counts[i] for i in parts)
        return abs(mean - value[run])

    rows = [float(after - before) for before, after in itertools.pairwise(borders)]
    longer = [run for run in runs if run[1] - run[0] > 2]
    return sum(gap(run, weights) for run in longer) < 0.01 * sum(gap(run, rows) for run in longer)


def deviation_with_model(
    function: Callable[[Any, Any], Any],
    forward: Callable[[Any, int], tuple[Any, Any]],
    micro_batches: Sequence[MicroBatch],
    device: torch.device,
) -> Deviation:
    """See ``deviation_over``; the model is called on parts of a micro-batch, or of some of one row each.

    For outputs without a row for each sample, as of models that compute their loss themselves. Micro-batches may not
    fit together, nor the model to parts of them: any error may come up. ``forward`` gives output and target from the
    data, under keys that follow from the number of the call, so that a model which draws is not judged.
    """
    data, samples = together(micro_batches)
    data = with_columns(data, samples)
    if not has_rows(leaves_of(data), samples):
        try:
            output, target = forward(own_rows(data, slice(None)), 0)
            value = function(*copies_of((output, target)))
        except Exception:  # a model may give what the loss takes only in training mode
            return Deviation.UNTESTED if samples > 1 else Deviation.NONE
        is_cut = all(has_rows(tensor, samples) for tensor in tensors_in(output))
        if samples < 2 or not isinstance(value, Tensor) or value.dim():
            return Deviation.NONE
        if is_cut and _is_mean_over_rows(function, (output, target), samples):
            return Deviation.NONE
        return Deviation.SUM if value.dtype in _WHOLE_NUMBERS else Deviation.UNTESTED
    calls, model_fails = itertools.count(), False

    def sums(rows: slice) -> Sums:
        nonlocal model_fails
        model_fails = True
        with torch.enable_grad():  # for a gradient within the forward pass, such as a penalty
            both = forward(own_rows(data, rows), next(calls))
            model_fails = False
            total, weight = sum_and_weight(function(*both), len(range(samples)[rows]))
        return float(total.detach()), float(weight)

    with uncompiled():
        found = deviation_over(sums, samples, 0.1 if torch.is_autocast_enabled(device.type) else 1e-4)
    return Deviation.NONE if found is Deviation.UNKNOWN and model_fails else found


def _is_mean_over_rows(function: Callable[[Any, Any], Any], pair: Any, samples: int) -> bool:
    """True for a mean over the rows of tensors that have one for each sample, where others, such as boxes, have not."""

    def sums(rows: slice) -> Sums:
        def some(leaf: Tensor) -> Tensor:
            return leaf.detach()[rows if has_rows(leaf, samples) else ...].clone()

        count = len(range(samples)[rows])
        return float(function(*tree_map_only(Tensor, some, pair))) * count, count

    with suppress(Exception):
        half = samples // 2
        whole, again, *parts = map(sums, (slice(None), slice(None), slice(half), slice(half, None)))
        return whole != again or deviation_of_parts(whole, parts[0], parts[1], 3e-5) is Deviation.NONE
    return False


def deviation_of_parts(whole: Sums, first: Sums, second: Sums, most: float) -> Deviation:
    """The finding from the sums over some rows and over two parts of them; ``most``: see ``deviation_over``."""
    if not all(map(math.isfinite, whole)):
        return Deviation.NONE
    if not all(map(math.isfinite, (*first, *second))):  # as when a part has nothing that is counted
        return Deviation.OTHER
    if all(_adds_up(*three, most) for three in zip(whole, first, second)):
        return Deviation.NONE
    value, one, other = (total / weight if weight else 0.0 for total, weight in (whole, first, second))
    return Deviation.SUM if _adds_up(value, one, other, most) else Deviation.OTHER


def _adds_up(whole: float, first: float, second: float, most: float) -> bool:
    return abs(whole - first - second) <= most * (abs(whole) + abs(first) + abs(second))
