r"""Losses that compare the samples of the whole global batch, as contrastive ones do (Gao et al. 2021, "GradCache").

    without gradients   k0  k1  k2  k3          the model, on each holder's micro-batches
    gathered             \   \  /  /            the outputs of all, in the order of the samples
    on every rank          loss(all)            its gradient, by each output
    the step            k0  k1  k2  k3          the model again, under the same keys: (output x its gradient).backward()

Every rank computes the same loss of the same tensors, and the step adds gradients in the order it always has. So the
bits do not depend on the number of processes, and the gradient is that of one undivided batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.generators import generators_kept
from lockstep.core.plan import StepPlan
from lockstep.core.values import inside, is_plain
from lockstep.data.batch import Batch, MicroBatch, tensors_in
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Kind, Snapshot
from lockstep.numerics.precision import dtype_named
from lockstep.run.checks.rows import copies_of
from lockstep.run.checks.short_step import with_own_data
from lockstep.run.evaluation import require_exact
from lockstep.run.step import StepCompute, wide
from lockstep.run.step_errors import no_gradient, no_value
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.strategies.dp import variables_of


def require_whole_models(strategy: Strategy, *, sync_batch_norm: bool) -> None:
    """Raises ``ConfigError`` where the model cannot be called for one micro-batch after the other, by all processes."""
    if isinstance(strategy, IndependentStrategy) or strategy.separates_units:
        raise ConfigError(
            f"whole_batch=True calls the whole model for each micro-batch, in processes that wait for each other, and "
            f"{strategy.name!r} does not. Use strategy 'ddp' or 'fsdp'."
        )
    if sync_batch_norm:
        raise ConfigError(
            "whole_batch=True runs the model on one micro-batch after the other, and sync_batch_norm on all of them "
            "side by side. Leave one of them out; LayerNorm and GroupNorm need no statistics of the batch."
        )


def stand_in(output: Any, target: Any) -> Tensor:
    """A loss by which a model is rehearsed whose own loss needs all micro-batches."""
    tensors = tensors_in(output)
    if not tensors:
        raise ConfigError(
            "With whole_batch=True the outputs of all micro-batches are put together, and no tensor is found in a "
            f"{type(output).__name__}. Return a tensor, or a tuple, list or dict of tensors."
        )
    leaves = [each for each in tensors if each.requires_grad]
    if not leaves:
        raise no_gradient(output)
    for each in leaves:
        require_exact(each, "whole_batch=True")
    return torch.stack([each.float().mean() for each in leaves]).sum()


@dataclass(frozen=True)
class SurrogateCompute(StepCompute):
    """A step whose loss is the sum of all outputs, each times the gradient of the loss of the whole batch by it."""

    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    """The loss of the whole batch."""
    gradients: Sequence[Sequence[Tensor | None]] = ()
    """By each tensor of the output of each micro-batch."""
    remark: str = ""
    """The warning of a loss that seems to return a mean and a count."""

    def digests(self) -> list[str]:
        """Those of the loss and of its gradients, which are the same on every rank that has a micro-batch."""
        gradients = [each for each in chain(*self.gradients) if each is not None]
        return [digest_tensor(each) for each in (self.total, *gradients)]

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The value and the weight count only for micro-batch 0, so that the loss of the step is that of the batch."""
        k = micro_batch.k if micro_batch.k < self.plan.leaves else 0
        with self.autocast():
            for call in self.events.output if micro_batch.k == k else ():
                call(micro_batch, output, target)
            self.randomness.begin_loss()
            if self.metrics is not None and micro_batch.k == k:
                self.metrics.note(output, target, micro_batch)
        tensors = [each for each in tree_flatten(output)[0] if isinstance(each, Tensor)]
        products = [  # a gradient is on another device where one process has several replicas
            (wide(each) * gradient.to(each.device)).sum()
            for each, gradient in zip(tensors, self.gradients[k], strict=True)
            if gradient is not None and each.requires_grad
        ]
        if not products:
            raise no_gradient(output)
        product, weight = torch.stack(products).sum(), float(k == 0)
        total = self.total.to(product.device) * weight
        return product - product.detach() + total, torch.full((), weight, device=product.device)


def surrogate(compute: StepCompute, batch: Batch, strategy: Strategy, *, looks: bool = False) -> SurrogateCompute:
    """Runs the model on this process's micro-batches without gradients, and the loss on all outputs. Collective.

    If it ``looks``, a loss that returns a pair is called for half of the batch as well.

    Raises:
        ConfigError: an output cannot be put together, or the loss uses parameters itself.
    """
    plan = batch.plan
    kept = [(each, each.clone()) for each in compute.forward_pass.model.buffers() if not each.is_meta]
    computed = []
    for micro_batch in batch.micro_batches:
        computed.append(_output(compute, micro_batch))
        with torch.no_grad():
            for buffer, values in kept:  # every micro-batch begins with those of the step
                buffer.copy_(values)
    held = [(part.k, each) for each, part in zip(computed, batch.micro_batches) if part.k < plan.leaves]
    everyone = strategy.gather_records([[k, each.shapes, each.texts] for k, each in held])
    shapes = {k: found for each in everyone for k, found, _ in each}
    texts = [found for each in everyone for _, _, found in each]
    sizes = [len(each) for each in plan.indices]
    forms = [_form(dtype, shape, sizes[0]) for dtype, shape in shapes[0]]
    _require_forms(forms, shapes, sizes)
    gathered = _gathered([each for _, each in held], forms, sizes, plan, strategy)
    if not computed:  # a process without a micro-batch has nothing that a gradient would be for
        return SurrogateCompute.taking(compute, total=torch.zeros((), device=strategy.device))
    are_common = (bool(column[0]) and len(set(column)) == 1 for column in zip_longest(*texts))
    # What is neither a tensor nor the same in every micro-batch is None for the loss
    leaves = [each if isinstance(each, Tensor) or next(are_common) else None for each in computed[0].leaves]
    return _surrogate(compute, replace(computed[0], leaves=leaves), gathered, forms, sizes, looks=looks)


class _Form(NamedTuple):
    """The form of a tensor for every micro-batch; if it has a row for each sample, the shape is that of a row."""

    dtype: str
    has_rows: bool
    shape: list[int]


def _form(dtype: str, shape: list[int], samples: int) -> _Form:
    has_rows = shape[:1] == [samples]
    return _Form(dtype, has_rows, shape[has_rows:])


def _require_forms(forms: Sequence[_Form], shapes: Mapping[int, list[Any]], sizes: Sequence[int]) -> None:
    """Raises ``ConfigError`` where the tensors of a micro-batch have another form than those of the first."""
    for k, found in sorted(shapes.items()):
        expected = [[dtype, [sizes[k]] * has_rows + shape] for dtype, has_rows, shape in forms]
        if found != expected:
            other = next(pair for pair in zip_longest(found, expected) if pair[0] != pair[1])
            here, first = ("no tensor" if each is None else "{} {}".format(*each) for each in other)
            raise ConfigError(
                "With whole_batch=True the outputs and targets of all micro-batches are put together, and they do not "
                f"fit: micro-batch {k} has {here} instead of {first}. Give outputs and targets "
                "one shape for each sample: pad lists of boxes or tokens to one length in the collate function."
            )


@dataclass(frozen=True)
class _Output:
    """The tensors of the output and of the target for one micro-batch."""

    tensors: list[Tensor]
    leaves: list[Any]
    """The same with all else that the output and the target hold."""
    spec: TreeSpec
    of_output: int
    """How many of the tensors belong to the output."""

    @property
    def shapes(self) -> list[Any]:
        """The dtype and the shape of each tensor."""
        return [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in self.tensors]

    @property
    def texts(self) -> list[str]:
        """A text for each leaf that is not a tensor."""
        return [_text(each) for each in self.leaves if not isinstance(each, Tensor)]


def _text(leaf: Any) -> str:
    """The same for equal values; empty for one that belongs only to its micro-batch, such as an array."""
    held = tree_leaves(leaf)
    if all(each is None or is_plain(each) for each in held):
        return repr(leaf)
    for _ in range(4):  # a snapshot reads tensors, and the host would wait for a GPU
        if any(isinstance(each, Tensor | np.ndarray) for each in held):
            return ""
        held = [part.value for each in held if not is_plain(each) for part in inside(each, most=16)]
    found = Snapshot({"": leaf}, restorable=False)  # an object may serve all of them
    return "" if Kind.TENSOR in found.kinds.values() else repr(found.texts)


def _output(compute: StepCompute, micro_batch: MicroBatch) -> _Output:
    compute.begin(micro_batch)
    with torch.no_grad():
        own = with_own_data(micro_batch).data  # the model runs on the data once more
        output, target = compute.output_and_target(own)
    compute.randomness.leave()
    if compute.forward is not None or isinstance(own, Mapping):
        target = None
    leaves, spec = tree_flatten((output, target), is_leaf=lambda v: isinstance(v, list | tuple) and not tensors_in(v))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    for each in tensors:
        # The host waits for another device. Every sample comes in the first epoch.
        if each.is_cpu or compute.plan.epoch == 0:
            require_exact(each, "whole_batch=True")
    of_output = sum(isinstance(each, Tensor) for each in tree_flatten(output)[0])
    return _Output(tensors, leaves, spec, of_output)


def _gathered(
    outputs: Sequence[_Output], forms: Sequence[_Form], sizes: Sequence[int], plan: StepPlan, strategy: Strategy
) -> list[Tensor]:
    """Each tensor of the outputs of all processes, with the rows of all samples in order; the same on every process."""
    numbers = [math.prod(each.shape) for each in forms]
    widths = [count * (sizes[0] if each.has_rows else 1) for count, each in zip(numbers, forms)]
    rows = torch.zeros(strategy.share.longest(plan.leaves), sum(widths), dtype=torch.float64, device=strategy.device)
    for row, output in zip(rows, outputs):
        for place, tensor in zip(torch.split(row, widths), output.tensors):
            place[: tensor.numel()] = tensor.detach().reshape(-1)
    ordered = strategy.gather_in_order(rows, plan.leaves)
    whole = []
    for (dtype, has_rows, shape), count, column in zip(forms, numbers, torch.split(ordered, widths, 1)):
        kind = dtype_named(dtype)
        if has_rows:
            parts = [row[: size * count].view(size, *shape) for row, size in zip(column, sizes)]
            whole.append(torch.cat(parts).to(kind))
        elif not bool((column == column[0]).all()):
            raise ConfigError(
                f"With whole_batch=True a tensor of shape {shape} without a row for each sample, such as a learned "
                "temperature, has to be the same for every micro-batch, and one differs. Return a row for each sample."
            )
        else:
            whole.append(column[0].view(shape).to(kind))
    return whole


def _surrogate(
    compute: StepCompute,
    first: _Output,
    whole: list[Tensor],
    forms: Sequence[_Form],
    sizes: Sequence[int],
    *,
    looks: bool,
) -> SurrogateCompute:
    inputs = [
        each.requires_grad_() if number < first.of_output and each.is_floating_point() else each
        for number, each in enumerate(whole)
    ]
    value = _value(compute, first, inputs)
    if compute.metrics is not None:
        compute.metrics.note_batch()
    with compute.autocast(), torch.enable_grad():
        total = _total(value)
    compute.randomness.leave()
    if not total.requires_grad:
        raise no_gradient(inputs[: first.of_output])
    _require_outputs_only(total, inputs, compute.forward_pass.model)
    trained = [each for each in inputs if each.requires_grad]
    found = dict(zip(map(id, trained), torch.autograd.grad(total, trained, allow_unused=True)))
    columns: list[list[Tensor | None]] = []
    for number, each in enumerate(inputs[: first.of_output]):
        gradient = found.get(id(each))
        if gradient is None:
            columns.append([None] * len(sizes))
        elif forms[number].has_rows:
            columns.append(list(torch.split(wide(gradient), list(sizes))))
        else:  # of what is the same for all, as if only micro-batch 0 had it
            gradient = wide(gradient)
            columns.append([gradient, *[torch.zeros_like(gradient)] * (len(sizes) - 1)])
    gradients = [list(column) for column in zip(*columns)]
    remark = ""
    if looks and isinstance(value, tuple):
        half = [each[: len(each) // 2] if form.has_rows else each for form, each in zip(forms, whole)]
        remark = _mean_and_count(compute, first, half, value)
    return SurrogateCompute.taking(compute, total=total.detach(), gradients=gradients, remark=remark)


def _mean_and_count(compute: StepCompute, first: _Output, half: Sequence[Tensor], pair: Any) -> str:
    """A warning if the loss of ``half`` of the batch tells that it returns (mean, count), which is no (sum, weight)."""
    before, mean, (total, count) = Snapshot({"the loss": compute.function}), math.inf, copies_of(pair)
    with generators_kept(), suppress(Exception):  # it may need the whole batch, or be negative
        part, few = copies_of(_value(compute, first, half))
        mean, summed = (abs(math.log(part / total * ratio)) for ratio in (1.0, count / few))
    compute.randomness.leave()
    before.restore()
    if not (math.isfinite(mean) and mean < summed and few < count):
        return ""
    return (
        f"The loss of the whole batch returned the pair ({float(total):.6g}, {float(count):.6g}), which counts as "
        f"(sum, weight), so the first is divided by the second. For half of the batch it is ({float(part):.6g}, "
        f"{float(few):.6g}), as if the first were a mean. If it is one, return {{'loss': mean, 'count': number}}, with "
        "also=['count'] if you need the number."
    )


def _total(value: Any) -> Tensor:
    """The loss of the whole batch, from what the function returned."""
    if isinstance(value, tuple) and len(value) == 2:
        total, weight = (wide(each).sum() if isinstance(each, Tensor) else each for each in value)
        value = total / weight
    if not isinstance(value, Tensor):
        raise no_value(value)
    return wide(value).mean()


def _value(compute: StepCompute, first: _Output, inputs: Sequence[Tensor]) -> Any:
    """The value of the loss for copies of ``inputs`` in the form of the ``first`` output and target."""
    waiting = (each.clone() for each in inputs)  # the loss may write into them
    leaves = [next(waiting) if isinstance(each, Tensor) else each for each in first.leaves]
    output, target = tree_unflatten(leaves, first.spec)
    compute.randomness.begin_micro_batch(compute.plan.step, compute.first_key)
    with compute.autocast(), torch.enable_grad():
        compute.randomness.begin_loss()
        try:
            return compute.value(output, target)
        except Exception as error:
            if any(each is None for each in leaves):
                error.add_note(
                    "With whole_batch=True the loss is given None for the data where run.backward has forward= or the "
                    "data are a dict, and for texts, arrays and objects that are not the same in every "
                    "micro-batch. Let forward= return what the loss needs as tensors, such as (output, labels)."
                )
            raise


def _require_outputs_only(total: Tensor, inputs: Sequence[Tensor], model: nn.Module) -> None:
    """Raises ``ConfigError`` where a loss uses parameters, to which no gradient would come."""
    own, names = set(map(id, inputs)), {id(each): name for name, each in model.named_parameters()}
    for variable in variables_of(total):
        if id(variable) not in own:
            name = names.get(id(variable), f"of shape {list(variable.shape)}")
            raise ConfigError(
                f"The loss uses the parameter {name!r} itself, and with whole_batch=True it is given outputs of the "
                "model alone. Return what it needs from the model's forward beside the rows, for example (embedding, "
                "self.temperature.exp())."
            )
