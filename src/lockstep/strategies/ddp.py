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

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.strategy_options import Level
from lockstep.core.plan import Share
from lockstep.core.summation_tree import Node, TreeStack, fold_rows
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_gather_rows, drop_process_groups
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import BucketShape, Reducer
from lockstep.reduce.reducer import most_slots
from lockstep.strategies.gradients import GradientTree, StepHeader
from lockstep.strategies.sharding import load_model_state
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class Replicated(Strategy):
    """Trains whole replicas: each runs its micro-batches, and their gradients are summed in one tree.

    Args:
        device: where the model is trained.
        micro_batches: K of the recipe.
        reducer: sums gradients over ``group``, and decides the level; None for one process.
        group: the processes with a replica each, which share the micro-batches; None for one.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    level = Level.BITWISE

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
        running_buffers: Sequence[str] = (),
    ) -> None:
        self.device, self._group = device, group
        self.share = Share()
        if group is not None:
            self.share = Share(holder=dist.get_rank(group), holders=dist.get_world_size(group))
        if reducer is not None:
            self.level = reducer.level
        self._micro_batches, self._reducer = micro_batches, reducer
        self._declared = running_buffers
        self._total_running: Tensor | None = None

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and makes room for the exchange of its gradients. Collective."""
        self._model = self._move(model)
        self._buffers = self._find_buffers(self._model)
        self._trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._tree = GradientTree(self._trainable, self._reducer, events=self.events)
        self._header = StepHeader(
            self.share, self._micro_batches, len(self._trainable), self._buffers.counters, flags=1
        )
        if self._reducer is not None:
            shapes = self._tree.bucket_shapes
            self._buffer_bucket = len(shapes) if self._buffers.numel else -1
            if self._buffers.numel:
                shapes = [*shapes, BucketShape(self._buffers.numel, self._buffers.dtype)]
            self._reducer.allocate(shapes, self._header.size, self._micro_batches)
            self._tree.connect(most_slots(self._micro_batches, self.share.holders))
        return self._model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's micro-batches and reduces. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        mine = self.share.of(leaves)
        self._begin(mine, leaves)
        losses, weights = [], []
        running = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self.device)
        for micro_batch in batch.micro_batches:
            self._buffers.begin_micro_batch()
            loss, weight = compute(micro_batch)
            if self._buffers.numel:
                values, counts = self._buffers.take()
                running.push_leaf(micro_batch.k, values)
                advanced += counts
            (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub
            self._tree.end_micro_batch()
            losses.append(loss.detach())
            weights.append(weight)
            for call in self.events.micro_batch_end:
                call(micro_batch)
        header = self._header.pack(losses, weights, self._tree.used(), advanced, [stop])
        compute.exchange()
        headers = self._reduce(header, running.take())
        return self._finish(headers, leaves, nodes=leaves)

    def _move(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained."""
        return model.to(self.device)

    def _find_buffers(self, model: nn.Module) -> RunningBuffers:
        return RunningBuffers(model, self._declared)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all processes, shape (processes, n). Collective."""
        return all_gather_rows(row, self._group)

    def release(self) -> None:
        """See ``Strategy.release``."""
        drop_process_groups(self)
        if self._reducer is not None:
            self._reducer.release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return self._trainable

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own state."""
        yield from self._model.state_dict().items()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into the model's own tensors."""
        load_model_state(self._model, state)

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``."""
        return 0 if self._reducer is None else self._reducer.bytes_sent

    def _begin(self, mine: range, leaves: int) -> None:
        if self._reducer is not None:
            self._reducer.begin(leaves)
        self._tree.begin(mine.start, mine.stop, leaves)
        self._buffers.begin_step()
        self._buffers.remember_others()

    def _reduce(self, header: Tensor, running: dict[Node, Tensor]) -> Tensor:
        if self._reducer is None:
            self._total_running = next(iter(running.values()), None)
            return header.unsqueeze(0)
        self._tree.start_all()
        if self._buffers.numel:
            for slot, value in enumerate(running.values()):
                self._reducer.staging(self._buffer_bucket, slot).copy_(value)
            for call in self.events.bucket_start:
                call(self._buffer_bucket)
            self._reducer.start(self._buffer_bucket)
        for waits in self.events.exchange_begin:
            waits()
        headers = self._reducer.finish(header)
        for ends in self.events.exchange_end:
            ends()
        if self._buffers.numel:
            self._total_running = self._reducer.total(self._buffer_bucket)
        return headers

    def _finish(self, headers: Tensor, leaves: int, *, nodes: int) -> StepResult:
        """Sets gradients and buffers from ``leaves`` micro-batches, which left ``nodes`` sets of running buffers."""
        losses = self._header.losses(headers, leaves)
        weight = fold_rows(self._header.weights(headers, leaves))
        used, advanced = self._header.counts(headers)
        if self._total_running is not None:
            self._buffers.finish_step(self._total_running, nodes, advanced)
        parts = self._tree.finish(self._used(used), weight.float())
        self._buffers.refuse_changed_others()
        loss = fold_rows(losses) / weight
        finite = torch.stack([losses.sum().float(), *parts]).isfinite().all()
        return StepResult(loss, losses, self._header.flag(headers), finite)

    def _used(self, everyones: Tensor) -> list[int]:
        """Uses of each parameter over all ranks; read back from the device only where this rank left one unused."""
        mine = self._tree.used()
        if all(mine):
            return mine
        return [int(count) for count in everyones.tolist()]


class Single(Replicated):
    """Runs the K micro-batches of a step one after the other on one device.

    device 0:  k0 k1 k2 k3 k4 k5 k6 k7 | update
    """

    name = "single"


class DistributedDataParallel(Replicated):
    """Distributes the micro-batches of a step over the ranks of a group."""

    name = "ddp"
