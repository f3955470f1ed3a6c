r"""Data parallel, a process and a replica per device; gradients are reduced while backward runs.

        rank 0:  k0 k1 k2 k3 =\
                               reduce in the tree's order -> the same update on every rank
        rank 1:  k4 k5 k6 k7 =/

``Replicated`` is the base of every strategy whose processes hold the whole model. ``Single`` runs it on one device: the
reference that all others are compared with.

torch's DistributedDataParallel is not used: it re-buckets after the first step, cannot hold the tree's partial sums,
fires no hook on a rank without a micro-batch, and must be told about unused parameters
(docs/decisions/0002-gradient-hooks.md). Its users get the same order from ``lockstep.reduce.ordered_hook``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.strategy_options import Level
from lockstep.core.plan import Share
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.collectives import all_gather_rows
from lockstep.numerics.hooks import first_hooked, hooked_globally
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import Reducer
from lockstep.strategies.gradients import StepSums, run_backward
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class Replicated(Strategy):
    """Trains whole replicas: each runs its micro-batches, and their gradients are summed in one tree.

    Args:
        device: where the model is trained.
        micro_batches: K of the recipe.
        reducer: sums gradients over ``group``, and decides the level; None for one process.
        group: the processes with a replica each, which share the micro-batches; None for one.
    """

    level = Level.BITWISE
    _runs_one_by_one = False
    """True if the backward pass of a micro-batch begins only when that of the one before has ended."""

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device, self._group = device, group
        self.share = Share()
        if group is not None:
            self.share = Share(holder=dist.get_rank(group), holders=dist.get_world_size(group))
        if reducer is not None:
            self.level = reducer.level
        self._micro_batches, self._reducer = micro_batches, reducer

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and makes room for the exchange of its gradients. Collective."""
        self._model = self._move(model)
        self._buffers = self._find_buffers(self._model)
        self._trainable = self._find_trainable(self._model)
        self._sums = StepSums(
            *(self._trainable, self._buffers, self._reducer, self.share, self._micro_batches, self.device),
            events=self.events,
            may_collect=self._may_collect,
        )
        return self._model

    def _may_collect(self) -> bool:
        """Returns whether nothing, neither a hook nor another rank, uses gradients before a backward pass has ended."""
        is_alone = self._runs_one_by_one and self._reducer is None
        return is_alone and first_hooked(self._model) is None and not hooked_globally()

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's micro-batches and reduces. See ``Strategy.backward``."""
        self.begin_backward(batch)
        for micro_batch in batch.micro_batches:
            self.begin_forward()
            self.end_forward(micro_batch, *compute(micro_batch), scale)
        return self.reduce(compute, stop)

    def begin_backward(self, batch: Batch) -> None:
        """Prepares for the micro-batches of a step."""
        leaves = batch.plan.leaves
        self._sums.begin(self.share.of(leaves), leaves)
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []

    def begin_forward(self) -> None:
        """Prepares for the forward pass of the next micro-batch."""
        self._sums.begin_forward()

    def end_forward(self, micro_batch: MicroBatch, loss: Tensor, weight: Tensor, scale: float) -> None:
        """Runs the backward pass from the sum of a micro-batch's losses, which have this weight; both 0-dim."""
        self._sums.end_forward(micro_batch.k)
        run_backward(loss, scale)
        self._sums.tree.end_micro_batch()
        self._losses.append(loss.detach())
        self._weights.append(weight)
        for call in self.events.micro_batch_end:
            call(micro_batch)

    def reduce(self, compute: Compute, stop: int) -> StepResult:
        """Sums gradients, losses and weights over the processes. Collective."""
        compute.exchange()
        return self._sums.reduce(self._losses, self._weights, stop)

    def abandon(self) -> None:
        """See ``Strategy.abandon``."""
        self._sums.tree.abandon()

    def _move(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained."""
        return model.to(self.device)

    def _find_trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _find_buffers(self, model: nn.Module) -> RunningBuffers:
        return RunningBuffers(model, self.running_buffers)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all processes, shape (processes, n). Collective."""
        return all_gather_rows(row, self._group)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        if self._reducer is not None:
            self._reducer.release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return self._trainable

    @property
    def all_bytes_sent(self) -> int:
        """See ``Strategy.all_bytes_sent``."""
        return 0 if self._reducer is None else self._reducer.bytes_sent


class Single(Replicated):
    """Runs the K micro-batches of a step one after the other on one device.

    device 0:  k0 k1 k2 k3 k4 k5 k6 k7 | update
    """

    name = "single"
    _runs_one_by_one = True


class DistributedDataParallel(Replicated):
    """Distributes the micro-batches of a step over the ranks of a group."""

    name = "ddp"
