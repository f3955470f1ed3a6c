"""``single`` and ``ddp`` with one forward pass for the whole share of a process.

The shares are rounds: rank r takes r, r + W, ... , and one that a ragged step leaves without a micro-batch is given
micro-batch 0, which it runs so that the others are not kept waiting, and which counts for nothing: not in the
statistics, not in the gradients, not in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.reduce import Reducer
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.one_forward.draws import RefuseDraws
from lockstep.strategies.one_forward.dropout import key_dropouts
from lockstep.strategies.one_forward.rows import join, split
from lockstep.strategies.replicated import Replicated
from lockstep.strategies.single import Single
from lockstep.sync_batch_norm import RankRows, synchronise
from lockstep.tree import Node

_Losses = list[tuple[Tensor, Tensor]]


class _OneForward(Replicated):
    """What both have in common."""

    _rows: RankRows
    """Exchanges statistics."""

    def place(self, model: nn.Module) -> nn.Module:
        """Converts every BatchNorm and dropout module, and places the model. Collective.

        Raises:
            ConfigError: the model has no BatchNorm, or something in it cannot be run on several micro-batches at once.
        """
        _refuse_other_statistics(model, self._declared)
        self._norms = synchronise(model, self._rows)
        self._keys = key_dropouts(model)
        self._watched = False
        return super().place(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's rows in one pass and reduces. See ``Strategy.backward``."""
        micro_batches = [each for each in batch.micro_batches if each.k < batch.plan.leaves]
        counts = bool(micro_batches)
        holder, holders = self.share.holder or 0, self.share.holders
        self._begin(range(holder, holder + 1), holders)
        self._buffers.begin_micro_batch()
        for norm in self._norms:
            norm.counts = counts
        results = self._forward(micro_batches or list(batch.micro_batches[:1]), compute)
        values, advanced = self._buffers.take()
        total = torch.stack([loss for loss, _ in results]).sum() * (scale if counts else 0.0)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
        self._tree.end_micro_batch()
        self._keys.end()
        counted = results if counts else []
        losses, weights = [loss.detach() for loss, _ in counted], [weight for _, weight in counted]
        header = self._fill_header(losses, weights, advanced, stop)
        headers = self._reduce(header, {Node(holder, holder + 1): values})
        return self._finish(headers, batch.plan.leaves, nodes=holders)

    def _forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> _Losses:
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


class SyncedSingle(_OneForward, Single):
    """One forward pass over the global batch: what the other one is compared with."""

    level = Level.TOLERANCE
    _rows = RankRows(None)


class SyncedDistributedDataParallel(_OneForward, DistributedDataParallel):
    """Data parallel with the statistics of every BatchNorm over the rows of all ranks.

    Args:
        device: see ``DistributedDataParallel``.
        micro_batches: the same.
        reducer: the same.
        group: the same.
        rows: exchanges statistics over the ranks of ``group``.
        running_buffers: none may be declared.
    """

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
