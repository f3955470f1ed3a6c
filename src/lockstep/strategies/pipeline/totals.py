"""The gradients and running statistics of one stage, added over micro-batches in the tree and over the data axis."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers
from lockstep.plan import Share
from lockstep.reduce import BucketShape, Reducer
from lockstep.reduce.contract import most_slots
from lockstep.strategies.gradients import GradientTree
from lockstep.tree import TreeStack


class Totals:
    """What a stage's micro-batches add up to.

    Args:
        stage: the modules, on their device.
        reducer: sums over the data axis; None if that has one holder.
        share: which micro-batches this holder runs.
        micro_batches: K of the recipe.
        declared: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
        device: of the stage.
    """

    def __init__(
        self,
        stage: nn.Module,
        reducer: Reducer | None,
        share: Share,
        micro_batches: int,
        declared: Sequence[str],
        device: torch.device,
    ) -> None:
        self.reducer, self._device = reducer, device
        names = [name for name, _ in stage.named_buffers()]
        here = [pattern for pattern in declared if any(fnmatchcase(name, pattern) for name in names)]
        self._buffers = RunningBuffers(stage, here)
        self.trainable = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self._tree = GradientTree(self.trainable, reducer)
        self._checked = False
        self._running: TreeStack[Tensor] | None = None
        if reducer is not None:
            shapes = self._tree.bucket_shapes
            self._buffer_bucket = len(shapes)
            if self._buffers.numel:
                shapes = [*shapes, BucketShape(self._buffers.numel, self._buffers.dtype)]
            reducer.allocate(shapes, len(self.trainable) + self._buffers.counters + 1, micro_batches)
            self._tree.connect(most_slots(micro_batches, share.holders))

    def begin(self, mine: range, leaves: int) -> None:
        """Starts a step in which this holder runs the micro-batches ``mine`` of ``leaves``."""
        if self.reducer is not None:
            self.reducer.begin(leaves)
        self._leaves = leaves
        self._tree.begin(mine.start, mine.stop, leaves)
        self._buffers.begin_step()
        self._running = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        self._advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self._device)
        if not self._checked:
            self._buffers.remember_others()

    def begin_forward(self) -> None:
        """Puts the step's old buffers in place before a forward pass."""
        self._buffers.begin_micro_batch()

    def end_forward(self, k: int) -> None:
        """Takes what the forward pass of micro-batch ``k`` left in the buffers."""
        if self._buffers.numel:
            values, counts = self._buffers.take()
            assert self._running is not None
            self._running.push_leaf(k, values)
            self._advanced += counts

    def end_backward(self) -> None:
        """Says that the backward pass of a micro-batch is done; they come in order of ``k``."""
        self._tree.end_micro_batch()

    def finish(self, weight: Tensor) -> list[Tensor]:
        """Reduces over the data axis, sets the new buffers and the gradients of the mean. Collective on that axis.

        Args:
            weight: of the whole global batch, 0-dim.

        Returns:
            Sums that are finite only if every gradient is.
        """
        assert self._running is not None
        running = self._running.take()
        used = self._tree.used()
        if self.reducer is None:
            total = next(iter(running.values()), None)
            counts = self._advanced
        else:
            sums, total = self._reduce(self.reducer, list(running.values()), used)
            counts = sums[len(used) :]
            if not all(used):
                used = [int(count) for count in sums[: len(used)].tolist()]
        if total is not None:
            self._buffers.finish_step(total, self._leaves, counts)
        parts = self._tree.finish(used, weight)
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        return parts

    def _reduce(
        self, reducer: Reducer, running: list[Tensor], used: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of [uses of each parameter, advances of each counter] over the holders, and of the buffers."""
        self._tree.start_all()
        if self._buffers.numel:
            for slot, value in enumerate(running):
                reducer.staging(self._buffer_bucket, slot).copy_(value)
            reducer.start(self._buffer_bucket)
        header = torch.zeros(len(used) + self._advanced.numel() + 1, dtype=torch.float64)
        header[: len(used)] = torch.tensor(used, dtype=torch.float64)
        header = header.to(self._device)
        header[len(used) : -1] = self._advanced
        sums = reducer.finish(header)[:, :-1].sum(0)
        return sums, reducer.total(self._buffer_bucket) if self._buffers.numel else None
