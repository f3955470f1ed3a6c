"""Finds models, losses and running buffers that depend on which other samples a micro-batch has.

    rows        0 1 2 3 4 5              computed twice
    parts       0 2 4 | 1 3 5            each sample has the same output there, and the loss is the mean of these
    in pairs    0 0 2 2 4 4 | 1 1 3 3 5 5           instead, where a model takes only as many samples as it was given

The model is in the mode in which it is trained, with the expectation of each random number in place of that number, and
BatchNorm takes its running statistics. Where two computations differ nevertheless, the model is evaluated instead.

``warn_of_division`` compares samples that are padded among others with the same ones alone, and running buffers after
all rows with those after parts of them.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from lockstep.data.batch import Batch, MicroBatch, tensors_in
from lockstep.numerics.compilation import uncompiled
from lockstep.numerics.hidden_state import evaluating
from lockstep.numerics.hooks import hooks_gradients
from lockstep.numerics.randomness import Expectations
from lockstep.numerics.running_buffers import FEW, warn_of_no_means
from lockstep.run.checks.means import (
    Deviation,
    Sums,
    are_apart,
    checked,
    deviation_of_parts,
    deviation_with_model,
    gradients_of,
    norm_of,
)
from lockstep.run.checks.rows import copies_of, has_rows, joined, leaves_of, own_rows, together, with_columns
from lockstep.run.checks.short_step import Buffers
from lockstep.run.step import StepCompute, sum_and_weight
from lockstep.run.whole_batch import stand_in
from lockstep.strategies import Strategy

logger = logging.getLogger(__name__)
_ENOUGH = 8
"""Samples; micro-batches of fewer are put together."""
_MOST_OF_OUTPUT, _MOST_OF_LOSS, _MOST_OF_GRADIENT, _IN_16_BITS = 1e-3, 1e-4, 1e-2, 0.03
"""The largest differences that are taken for rounding: of outputs, losses and gradients, and of all under autocast."""
_ROUNDINGS = {torch.float64: 16, torch.float32: 16, torch.bfloat16: 1, torch.float16: 1}
"""The least number of roundings by which the output of a module may differ, where rounding alone makes it differ."""
_MIXED = (
    "The output of the model for a sample depends on the other samples of its micro-batch%s. So a step is another one "
    "than with all its samples at once%s. Layers of sequences need batch_first=True. If samples are to be compared, do "
    "it in the loss, with whole_batch=True, or use micro_batches=1."
)
_WHERE = {
    "": ("", ""),
    "training": (" in training mode", ""),
    "evaluation": (", also in evaluation mode", ", and an evaluation depends on the size of micro-batches"),
}
"""The ends of the two sentences, for each mode of which it is known."""
_Mode = Callable[[nn.Module], AbstractContextManager[None]]


@contextmanager
def expected(model: nn.Module) -> Iterator[None]:
    """A context without gradients, random numbers and statistics of a micro-batch, with the model in its own mode."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        with torch.no_grad(), Expectations():  # type: ignore[no-untyped-call]  # torch's stub
            yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


@contextmanager
def _nudged(model: nn.Module) -> Iterator[None]:
    """A context in which the output of each module of ``model`` is another one by some roundings."""

    def near(times: int, _module: nn.Module, _given: Any, output: Any) -> Any:
        def nudge(each: Tensor) -> Tensor:
            roundings = times * _ROUNDINGS.get(each.dtype, 0)
            return each * (1 + roundings * torch.finfo(each.dtype).eps) if roundings else each

        return tree_map_only(Tensor, nudge, output)

    handles = [m.register_forward_hook(partial(near, 1 + place % 3)) for place, m in enumerate(model.modules())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Call:
    """One call of the model."""

    rows: Sequence[int]
    outputs: list[Tensor]
    loss: Sums | None
    """Sum and weight; None where the loss is not looked at, or failed."""
    near: Sequence[Tensor] = ()
    """Outputs that differ from these by as much as rounding may: by all, for a model less its copy."""


@dataclass(frozen=True)
class Seen:
    """The findings of calls of the model; none where they failed or drew random numbers all the same."""

    mode: _Mode = evaluating
    """The mode in which the model gives the same output twice."""
    mixes: str | None = None
    """The mode in which outputs depend on other samples, as in ``_WHERE``; None if they were not seen to."""
    loss: Deviation | None = None
    """The kind of the loss of the model's outputs; None if outputs depend on other samples, or nothing tells."""

    def warn(self, *, told: bool) -> None:
        """Warns of outputs that depend on other samples, where nobody has ``told`` that yet."""
        if self.mixes is not None and not told:
            logger.warning(_MIXED, *_WHERE[self.mixes])


@dataclass(frozen=True)
class _Look:
    """The calls of the model on rows of one micro-batch."""

    compute: StepCompute
    data: Any
    samples: int
    judges_loss: bool
    """True if the loss is called, too."""
    has_graph: bool
    """True if the forward pass may compute gradients."""
    ways: Sequence[bool]
    """For each way, whether samples are put in pairs; the second way, if the first fails."""
    buffers: Buffers

    def calls(self, mode: _Mode) -> list[_Call]:
        """Those of all rows, and of two parts of them; none where they fail, or two of the same rows differ."""
        with mode(self.compute.forward_pass.model), self.compute.autocast(), uncompiled():
            whole, again = self._call(range(self.samples), 0), self._call(range(self.samples), 1)
            if not all(map(torch.equal, whole.outputs, again.outputs)):
                return []
            if whole.loss != again.loss:
                whole = replace(whole, loss=None)
            for place, in_pairs in enumerate(self.ways, 1):
                try:
                    found = [whole, *(self._call(self._rows(first, in_pairs), 2) for first in (0, 1))]
                except Exception:
                    if place == len(self.ways):
                        raise
                    continue
                if len(self.ways) > 1 and self.mixes(found):
                    with suppress(Exception), _nudged(self.compute.forward_pass.model):
                        found[0] = replace(whole, near=self._call(whole.rows, 0).outputs)
                return found
        return []

    def _rows(self, first: int, in_pairs: bool) -> Sequence[int]:
        every = range(self.samples)
        return [min(each - each % 2 + first, every[-1]) for each in every] if in_pairs else every[first::2]

    def _call(self, rows: Sequence[int], number: int) -> _Call:
        compute, loss = self.compute, None
        self.buffers.restore()
        compute.randomness.begin_micro_batch(compute.plan.step, number)
        with torch.set_grad_enabled(self.has_graph):
            output, target = compute.output_and_target(own_rows(self.data, list(rows)))
        outputs = [each.detach().clone() for each in tensors_in(output)]  # the loss may write into them
        if self.judges_loss:
            compute.randomness.begin_loss()
            with suppress(Exception):
                total, weight = sum_and_weight(compute.function(output, target), len(rows))
                loss = float(total.detach()), float(weight)
        return _Call(rows, outputs, loss)

    def mixes(self, calls: Sequence[_Call]) -> bool:
        """True if an output for a sample is another one in a part."""
        most = _most(self.compute, _MOST_OF_OUTPUT)

        def is_other(whole: Tensor, part: Tensor, near: Tensor, rows: Sequence[int]) -> bool:
            if not whole.is_floating_point() or whole.dim() == 0 or len(whole) != self.samples:
                return False
            if whole[rows].shape != part.shape:
                return False
            largest = torch.maximum(most * whole.abs().max(), (whole - near).abs().max())
            if len(rows) == self.samples and (part[rows] - part).abs().max() > largest:
                return False  # two equal samples have other rows: these are not of samples
            return bool((whole[rows] - part).abs().max() > largest)

        return any(
            is_other(one, other, near, list(part.rows))
            for part in calls[1:]
            for one, other, near in zip(calls[0].outputs, part.outputs, calls[0].near or calls[0].outputs)
        )

    def judge(self, calls: Sequence[_Call]) -> Deviation | None:
        """Compares the loss with those over the parts; None where they do not tell."""
        losses = [each.loss for each in calls if each.loss is not None]
        if len(losses) != 3:
            return None
        whole, *parts = calls
        is_alike = all(
            one.dim() and len(one) == self.samples and one[list(part.rows)].shape == other.shape
            for part in parts
            for one, other in zip(whole.outputs, part.outputs, strict=True)
        )
        if not is_alike or not all(map(math.isfinite, itertools.chain(*losses))):
            return None
        times = sum(len(part.rows) for part in parts) / self.samples
        sums = losses[0][0] * times, losses[0][1] * times
        return deviation_of_parts(sums, losses[1], losses[2], _most(self.compute, _MOST_OF_LOSS))


def _with_more_samples(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """One micro-batch of the samples of several, if these have few and are alike; else the micro-batches as they are.

    Of two samples that go to one expert, say, a balance of experts is a mean.
    """
    size = len(micro_batches[0]) if len(micro_batches) > 1 else _ENOUGH
    if 1 < size < _ENOUGH:  # single samples are put together in any case
        several = micro_batches[: -(-_ENOUGH // size)]
        with suppress(Exception):  # they may have several lengths
            data, samples = together(several, _ENOUGH)
            if has_rows(leaves_of(with_columns(data, samples)), samples):
                return [replace(several[0], data=data, indices=np.concatenate([each.indices for each in several]))]
    return micro_batches


def look_at_others(
    strategy: Strategy, compute: StepCompute, micro_batches: Sequence[MicroBatch], *, judges: bool, keeps: bool
) -> Seen:
    """Looks at calls of the model on other rows of the first micro-batch; see the module's description.

    Where several processes compute a forward pass together, all of them must call this. ``judges``: the loss is
    looked at, too; ``keeps``: the model may keep a term for it, which is seen better in more samples.
    """
    seen = _look_at(strategy, compute, micro_batches, judges=judges)
    if strategy.computes_together or not keeps or seen.mixes is not None or (seen.loss and seen.loss.reason):
        return seen
    if (more := _with_more_samples(micro_batches)) is not micro_batches:
        of_more = _look_at(strategy, compute, more, judges=judges)
        return of_more if of_more.mode is expected else seen
    return seen


def _look_at(strategy: Strategy, compute: StepCompute, micro_batches: Sequence[MicroBatch], *, judges: bool) -> Seen:
    """See ``look_at_others``; of one micro-batch, or of single samples together."""
    look, together_with_others = None, strategy.computes_together
    with suppress(Exception):  # there may be none
        data, samples = together(micro_batches, 1 if together_with_others else 2)
        data = with_columns(data, samples)
        if samples > 1 and has_rows(leaves_of(data), samples):
            ways = (True,) if together_with_others else (False, True)
            buffers = Buffers((compute.forward_pass.model,))
            # Under fsdp, a graph that no backward pass uses would keep the parameters of a closed run.
            has_graph = strategy.replicated or together_with_others
            look = _Look(compute, data, samples, judges and not together_with_others, has_graph, ways, buffers)
    if together_with_others and not all(strategy.gather_records(look is not None)):
        return Seen()
    if look is None:
        return Seen()
    try:
        if together_with_others:  # an error leaves other processes waiting
            return Seen(expected, "" if look.mixes(look.calls(expected)) else None)
        return _seen(look)
    finally:
        compute.randomness.leave()


def _seen(look: _Look) -> Seen:
    """See ``look_at_others``, for a process that computes alone."""
    calls, of_evaluation = list[_Call](), list[_Call]()
    with suppress(Exception):
        calls = look.calls(expected)
    if not calls or look.mixes(calls):
        with suppress(Exception):
            of_evaluation = look.calls(evaluating)
    if look.mixes(of_evaluation):
        return Seen(evaluating, "evaluation")
    if look.mixes(calls):
        return Seen(expected, "training")
    return Seen(expected if calls else evaluating, None, look.judge(calls or of_evaluation))


def judge_with_model(
    compute: StepCompute, micro_batches: Sequence[MicroBatch], mode: _Mode, *, trains: bool
) -> Deviation:
    """Judges the loss of a step as ``deviation_with_model`` does; its metrics note what they are.

    ``trains``: the gradients of the parameters are compared, too.
    """
    found, more = Deviation.NONE, _with_more_samples(micro_batches)
    with mode(compute.forward_pass.model), compute.autocast():
        forward, device = partial(_output_and_target, compute), compute.forward_pass.device
        if compute.metrics is not None:
            compute.metrics.judge(forward, micro_batches, device)
        with suppress(Exception):
            found = deviation_with_model(compute.function, forward, micro_batches, device)
            if found is Deviation.NONE and more is not micro_batches:
                found = deviation_with_model(compute.function, forward, more, device)
            if trains and not found.reason and _has_other_gradients(compute, micro_batches):
                found = Deviation.GRADIENT
    compute.randomness.leave()
    return found


def warn_of_division(
    strategy: Strategy, compute: StepCompute, batch: Batch, model: nn.Module, buffers: Buffers
) -> None:
    """Warns of what else depends on how a step is divided into micro-batches: running buffers, and padding.

    Args:
        compute: of this process; the others call nothing.
        batch: the step.
        model: as the user knows it, with the names that ``running_buffers`` has.
        buffers: those of the model.
    """
    if not (strategy.replicated and batch.micro_batches):
        return
    _judge_running_buffers(compute, batch.micro_batches, model, strategy.running_buffers, buffers.restore)
    if compute.function is not stand_in and batch.apart:
        _warn_of_padding(compute, batch.apart)


def _judge_running_buffers(
    compute: StepCompute,
    micro_batches: Sequence[MicroBatch],
    model: nn.Module,
    patterns: Sequence[str],
    restore: Callable[[], None],
) -> None:
    """Warns of running buffers that are no means over samples, by what some rows and two halves of them leave there.

    Layers that normalise or drop values are in evaluation mode meanwhile. Nothing is told where the model draws random
    numbers, or fails, or where its input has no row for each sample. ``restore`` gives the buffers their values back.
    """
    names = [n for n, b in model.named_buffers() if b.is_floating_point() and any(fnmatchcase(n, p) for p in patterns)]
    if not names or compute.plan.leaves < 2:
        return
    values: list[list[Tensor]] = []
    others = [m for m in model.modules() if m.training and isinstance(m, (_NormBase, _DropoutNd))]
    for module in others:
        module.training = False
    with suppress(Exception), compute.autocast(), uncompiled():
        data, samples = together(micro_batches, FEW)
        data = with_columns(data, samples)
        if has_rows(leaves_of(data), samples):
            values.append([model.get_buffer(name).detach().clone() for name in names])
            every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
            for number, rows in enumerate((every, every, even, odd, odd, every)):
                if number not in (1, 3):
                    restore()
                compute.function(*_output_and_target(compute, own_rows(data, rows), number))
                values.append([model.get_buffer(name).detach().clone() for name in names])
    for module in others:
        module.training = True
    compute.randomness.leave()
    if len(values) == 7:
        warn_of_no_means(names, list(zip(*values, strict=True)), samples)


def _warn_of_padding(compute: StepCompute, apart: Sequence[Any]) -> None:
    """Warns of a loss that depends on how far the collate function pads a sample.

    Each sample (see ``Batch.apart``) is computed by itself, as it is padded among others and as it is alone. Nothing is
    told where the model draws random numbers, or fails, or where padding is not all that differs.
    """
    whole, *singles = apart
    whole = with_columns(whole, len(singles))
    if not has_rows(leaves_of(whole), len(singles)):
        return
    among = [own_rows(whole, slice(n, n + 1)) for n in range(len(singles))]
    most = _most(compute, 1e-3)

    def sums(data: Any, number: int) -> Tensor:
        with torch.enable_grad():
            total, weight = sum_and_weight(compute.function(*_output_and_target(compute, data, number)), 1)
        return torch.tensor([float(total.detach()), float(weight)], dtype=torch.float64)

    padded = [pair for pair in zip(among, singles) if _is_padded(*map(leaves_of, pair))]
    with suppress(Exception), evaluating(compute.forward_pass.model), compute.autocast(), uncompiled():
        found = [(sums(long, 0), sums(long, 1), sums(short, 0)) for long, short in padded]
        if any(torch.equal(long, again) and not torch.allclose(long, short, most, 0) for long, again, short in found):
            logger.warning(
                "The loss of a sample depends on how far the collate function pads it, which is to the longest sample "
                "of its micro-batch. So a step is another one than with all its samples at once. Use a mask in the "
                "model, and in the loss the pair (sum, how many were counted); pad all samples to one length; or use "
                "micro_batches=1."
            )
    compute.randomness.leave()


def _is_padded(long: Sequence[Any], short: Sequence[Any]) -> bool:
    """True if some tensors have more entries, of one value, at the end or the beginning, and the others are equal."""
    pairs = [(one, other) for one, other in zip(long, short) if isinstance(one, Tensor) and isinstance(other, Tensor)]
    if len(long) != len(short) or any(one.dim() != other.dim() for one, other in pairs):
        return False
    for one, other in pairs:
        at_end = tuple(slice(max(0, size - few), size) for size, few in zip(one.shape, other.shape))
        held = next((r for r in (tuple(map(slice, other.shape)), at_end) if torch.equal(one[r], other)), None)
        if held is None:
            return False
        is_added = torch.ones_like(one, dtype=torch.bool)
        is_added[held] = False
        if not bool((one[is_added] == one[is_added][:1]).all()):
            return False
    return any(one.shape != other.shape for one, other in pairs)


def judge_lengths(compute: StepCompute, micro_batches: Sequence[MicroBatch], *, alone: bool) -> Deviation | None:
    """Judges the loss where micro-batches of single samples differ in shape, so that no model takes them together.

    It goes by their outputs together; ``LENGTHS`` where these differ in shape, too, or no process calls the model
    ``alone``. None for other micro-batches.
    """
    shapes = {tuple(each.shape for each in tensors_in(leaves_of(part.data))) for part in micro_batches}
    if len(shapes) < 2 or len(micro_batches[0]) > 1:
        return None
    if not alone:
        return Deviation.LENGTHS
    pairs, found = list[Any](), Deviation.LENGTHS
    with suppress(Exception), expected(compute.forward_pass.model), compute.autocast(), uncompiled():
        for number, part in enumerate(micro_batches[:_ENOUGH]):
            pairs.append(copies_of(_output_and_target(compute, own_rows(part.data, slice(None)), number)))
        output, target = joined(pairs)
        if has_rows((output, target), len(pairs)):
            found = checked(compute.function, output, target, len(pairs), trains=True)
    compute.randomness.leave()
    return found


def _has_other_gradients(compute: StepCompute, micro_batches: Sequence[MicroBatch]) -> bool:
    """True if the gradients of the loss over some rows, and over the others, do not add up to those over all."""
    model = compute.forward_pass.model
    data, samples = together(micro_batches)
    data, numbers = with_columns(data, samples), itertools.count()
    trained = [each for each in model.parameters() if each.requires_grad]
    if samples < 2 or not has_rows(leaves_of(data), samples) or hooks_gradients(model):
        return False

    def gradients(rows: Sequence[int]) -> list[Tensor]:
        with torch.enable_grad():
            pair = _output_and_target(compute, own_rows(data, list(rows)), next(numbers))
            total, _ = sum_and_weight(compute.function(*pair), len(rows))
        return gradients_of(total, trained)

    every = range(samples)
    with uncompiled():
        whole, most = gradients(every), _most(compute, _MOST_OF_GRADIENT)
        if are_apart(whole, gradients(every), most):
            return False
        rest = whole
        for part in (every[::2], every[1::2]):
            rest = [one - other for one, other in zip(rest, gradients(part), strict=True)]
        return norm_of(rest) > most * norm_of(whole)


def _most(compute: StepCompute, usual: float) -> float:
    """The largest difference that is taken for rounding."""
    with compute.autocast():
        return _IN_16_BITS if torch.is_autocast_enabled(compute.forward_pass.device.type) else usual


def _output_and_target(compute: StepCompute, part: Any, number: int) -> tuple[Any, Any]:
    """Those of some data, under keys that follow from the number of the call."""
    compute.randomness.begin_micro_batch(compute.plan.step, number)
    return compute.output_and_target(part)
