"""``single`` and ``ddp`` with one forward pass over all micro-batches of a process, as synchronised BatchNorm needs.

Inputs are joined into one batch, and outputs are split back by rows. Rank r takes the micro-batches r, r + W, ... . A
rank that a ragged step leaves without one runs micro-batch 0 as padding, so that the others need not wait: it counts
for neither the statistics, the gradients nor the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.config.strategy_options import Level
from lockstep.core.plan import Share
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import RankRows, synchronise
from lockstep.reduce import Reducer
from lockstep.strategies.ddp import DistributedDataParallel, Replicated, Single
from lockstep.strategies.fused_dropout import RefuseDraws, key_dropouts
from lockstep.strategies.strategy import Compute, StepResult

_WHY = "With sync_batch_norm the inputs of a process's micro-batches are joined, so"


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


def _join_leaves(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if any(isinstance(leaf, Tensor) or leaf != first for leaf in column):
            raise ConfigError(
                f"{_WHY} values other than tensors must be equal in all of them. Found {first!r} and others."
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


class _FusedForward(Replicated):
    """The base of both."""

    _rows: RankRows
    """Exchanges statistics."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Converts every BatchNorm and dropout module, and places the model. Collective.

        Raises:
            ConfigError: the model has no BatchNorm, or something in it cannot be run on several micro-batches at once.
        """
        _refuse_other_statistics(model, self._declared)
        self._norms = synchronise(model, self._rows)
        self._keys = key_dropouts(model)
        self._watched = False
        return super().setup_model(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's rows in one pass and reduces. See ``Strategy.backward``."""
        micro_batches = [each for each in batch.micro_batches if each.k < batch.plan.leaves]
        counts = bool(micro_batches)
        holder, holders = self.share.holder or 0, self.share.holders
        self._sums.begin(range(holder, holder + 1), holders)
        self._sums.begin_forward()
        for norm in self._norms:
            norm.counts = counts
        results = self._forward(micro_batches or list(batch.micro_batches[:1]), compute)
        self._sums.end_forward(holder)
        total = torch.stack([loss for loss, _ in results]).sum() * (scale if counts else 0.0)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
        self._sums.end_backward()
        self._keys.end()
        for micro_batch in micro_batches:
            for call in self.events.micro_batch_end:
                call(micro_batch)
        counted = results if counts else []
        losses, weights = [loss.detach() for loss, _ in counted], [weight for _, weight in counted]
        return self._sums.reduce(losses, weights, stop, batch.plan.leaves)

    def _forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[tuple[Tensor, Tensor]]:
        """The forward pass over all rows; sum and weight of the loss of each micro-batch."""
        inputs, keys, sizes = [], [], [len(each) for each in micro_batches]
        for micro_batch in micro_batches:
            compute.begin(micro_batch)
            keys.append(torch.default_generator.initial_seed())
            inputs.append(compute.inputs(micro_batch))
        self._keys.begin(list(zip(sizes, keys)))
        arguments, named = join([(given, by_name) for given, by_name, _ in inputs], sizes)
        with nullcontext() if self._watched else RefuseDraws(self._keys):
            with compute.autocast():
                output = self._model(*arguments, **named)
            outputs, targets = split(output, sizes), [target for _, _, target in inputs]
            self._watched = True
            return [compute.loss(*each) for each in zip(outputs, targets, micro_batches)]


class SyncedSingle(_FusedForward, Single):
    """One forward pass over the global batch: what the other one is compared with."""

    level = Level.TOLERANCE
    _rows = RankRows(None)


class SyncedDistributedDataParallel(_FusedForward, DistributedDataParallel):
    """Data parallel with the statistics of every BatchNorm over the rows of all ranks."""

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer,
        group: dist.ProcessGroup,
        rows: RankRows,
        running_buffers: Sequence[str] = (),
    ) -> None:
        super().__init__(device, micro_batches, reducer, group, running_buffers)
        self.share: Share = replace(self.share, rounds=True)
        if self.level is Level.BITWISE:
            self.level = Level.TOLERANCE
        self._rows = rows

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        self._rows.release()


def _refuse_other_statistics(model: nn.Module, declared: Sequence[str]) -> None:
    """Buffers that a forward pass changes, and that are not those of a BatchNorm: each rank would have its own."""
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if others or declared:
        named = f"the running statistics of {others[0]!r}" if others else f"running_buffers={list(declared)}"
        raise ConfigError(
            f"sync_batch_norm combines the statistics of BatchNorm over the global batch, and {named} would be those "
            "of one process's rows. Leave sync_batch_norm out, or train without them."
        )
