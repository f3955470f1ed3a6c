"""The gradients and running statistics of one stage, added over micro-batches in the tree and over the data axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        row: size of the row that ``reduce`` exchanges.
        held: by name, what gets the gradients where the reducer gives each holder a part of them.
    """

    def __init__(
        self,
        stage: nn.Module,
        reducer: Reducer | None,
        share: Share,
        micro_batches: int,
        declared: Sequence[str],
        device: torch.device,
        row: int,
        held: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.reducer, self._device = reducer, device
        names = [name for name, _ in stage.named_buffers()]
        here = [pattern for pattern in declared if any(fnmatchcase(name, pattern) for name in names)]
        self._buffers = RunningBuffers(stage, here)
        self.trainable = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self._tree = GradientTree(self.trainable, reducer, held)
        self._checked = False
        self._running: TreeStack[Tensor] | None = None
        if reducer is not None:
            shapes = self._tree.bucket_shapes
            self._buffer_bucket = len(shapes)
            if self._buffers.numel:
                shapes = [*shapes, BucketShape(self._buffers.numel, self._buffers.dtype)]
            reducer.allocate(shapes, row + len(self.trainable) + self._buffers.counters, micro_batches)
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

    def reduce(self, row: Tensor) -> Tensor:
        """Reduces over the data axis; gradients and buffers are set by ``finish``. Collective on that axis.

        Args:
            row: numbers of this holder that are exchanged on the way, float64, shape (n,).

        Returns:
            The rows of all holders, shape (holders, n).
        """
        assert self._running is not None
        nodes, self._used = list(self._running.take().values()), self._tree.used()
        if self.reducer is None:
            self._total, self._counts = (nodes[0] if nodes else None), self._advanced
            return row.unsqueeze(0)
        self._tree.start_all()
        if self._buffers.numel:
            for slot, value in enumerate(nodes):
                self.reducer.staging(self._buffer_bucket, slot).copy_(value)
            self.reducer.start(self._buffer_bucket)
        uses = torch.tensor(self._used, dtype=torch.float64).to(self._device)
        headers = self.reducer.finish(torch.cat([row, uses, self._advanced.double()]))
        self._total = self.reducer.total(self._buffer_bucket) if self._buffers.numel else None
        sums = headers[:, len(row) :].sum(0)
        self._counts = sums[len(uses) :]
        if not all(self._used):
            self._used = [int(count) for count in sums[: len(uses)].tolist()]
        return headers[:, : len(row)]

    def finish(self, weight: Tensor) -> list[Tensor]:
        """Sets the new buffers and the gradients of the mean, after ``reduce``.

        Args:
            weight: of the whole global batch, 0-dim.

        Returns:
            Sums that are finite only if every gradient is.
        """
        if self._total is not None:
            self._buffers.finish_step(self._total, self._leaves, self._counts)
        parts = self._tree.finish(self._used, weight)
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        return parts
