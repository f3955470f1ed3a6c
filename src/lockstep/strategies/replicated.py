"""What ``single`` and ``ddp`` share: every process holds the whole model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers
from lockstep.data.batch import Batch
from lockstep.plan import Share
from lockstep.reduce import BucketShape, Reducer
from lockstep.reduce.contract import most_slots
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.gradients import GradientTree
from lockstep.sums import fold_rows
from lockstep.tree import Node, TreeStack

_ALL = Share()


class Replicated(Strategy):
    """Trains whole replicas: each runs its micro-batches, and their gradients are summed in one tree.

    Args:
        device: where the model is trained.
        micro_batches: K of the recipe.
        reducer: sums over the holders; None on one device.
        share: which micro-batches this process computes.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        reducer: Reducer | None = None,
        share: Share = _ALL,
        running_buffers: Sequence[str] = (),
    ) -> None:
        self.device, self.share = device, share
        self._micro_batches, self._reducer = micro_batches, reducer
        self._declared = running_buffers
        self._total_running: Tensor | None = None
        self._checked = False

    def place(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and makes room for the exchange of its gradients. Collective."""
        self._model = self._move(model)
        self._buffers = self._find_buffers(self._model)
        self._trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._tree = GradientTree(self._trainable, self._reducer)
        self._longest = self.share.longest(self._micro_batches)
        self._header = 2 * self._longest + len(self._trainable) + self._buffers.counters + 1
        if self._reducer is not None:
            shapes = self._tree.bucket_shapes
            self._buffer_bucket = len(shapes) if self._buffers.numel else -1
            if self._buffers.numel:
                shapes = [*shapes, BucketShape(self._buffers.numel, self._buffers.dtype)]
            self._reducer.allocate(shapes, self._header, self._micro_batches)
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
        header = self._fill_header(losses, weights, advanced, stop)
        compute.exchange()
        headers = self._reduce(header, running.take())
        return self._finish(headers, leaves, nodes=leaves)

    def _move(self, model: nn.Module) -> nn.Module:
        """Puts the model where it is trained."""
        return model.to(self.device)

    def _find_buffers(self, model: nn.Module) -> RunningBuffers:
        return RunningBuffers(model, self._declared)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all holders; with one there is nothing to exchange."""
        return row.unsqueeze(0)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return self._trainable

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own state."""
        yield from self._model.state_dict().items()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into the model's own tensors."""
        given = OrderedDict(state)
        # Without the version metadata, torch would take every module's state for one of its oldest format.
        given._metadata = getattr(self._model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]  # torch's
        self._model.load_state_dict(given)

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``."""
        return 0 if self._reducer is None else self._reducer.bytes_sent

    def _begin(self, mine: range, leaves: int) -> None:
        if self._reducer is not None:
            self._reducer.begin(leaves)
        self._tree.begin(mine.start, mine.stop, leaves)
        self._buffers.begin_step()
        if not self._checked:
            self._buffers.remember_others()

    def _fill_header(
        self, losses: list[Tensor], weights: list[Tensor], advanced: Tensor, stop: int
    ) -> Tensor:
        """[losses, weights] of the local micro-batches, uses of each parameter, advances of each counter, stop."""
        header = torch.zeros(self._header, dtype=torch.float64)
        position = 2 * self._longest
        header[position : position + len(self._trainable)] = torch.tensor(
            self._tree.used(), dtype=torch.float64
        )
        header[-1] = float(stop)
        header = header.to(self.device)
        if losses:
            header[: len(losses)] = torch.stack(losses)
            header[self._longest : self._longest + len(weights)] = torch.stack(weights)
        header[position + len(self._trainable) : -1] = advanced
        return header

    def _reduce(self, header: Tensor, running: dict[Node, Tensor]) -> Tensor:
        if self._reducer is None:
            self._total_running = next(iter(running.values()), None)
            return header.unsqueeze(0)
        self._tree.start_all()
        if self._buffers.numel:
            for slot, value in enumerate(running.values()):
                self._reducer.staging(self._buffer_bucket, slot).copy_(value)
            self._reducer.start(self._buffer_bucket)
        headers = self._reducer.finish(header)
        if self._buffers.numel:
            self._total_running = self._reducer.total(self._buffer_bucket)
        return headers

    def _finish(self, headers: Tensor, leaves: int, *, nodes: int) -> StepResult:
        """Sets gradients and buffers from ``leaves`` micro-batches, which left ``nodes`` sets of running buffers."""
        losses = _in_order(headers, self.share, leaves, 0)
        weight = fold_rows(_in_order(headers, self.share, leaves, self._longest))
        sums = headers[:, 2 * self._longest :].sum(0)
        if self._total_running is not None:
            advanced = sums[len(self._trainable) : -1]
            self._buffers.finish_step(self._total_running, nodes, advanced)
        parts = self._tree.finish(self._used(sums), weight.float())
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        loss = fold_rows(losses) / weight
        finite = torch.stack([losses.sum().float(), *parts]).isfinite().all()
        return StepResult(loss, losses, headers[:, -1].max(), finite)

    def _used(self, sums: Tensor) -> list[int]:
        """Uses of each parameter over all ranks; read back from the device only where this rank left one unused."""
        mine = self._tree.used()
        if all(mine):
            return mine
        return [int(count) for count in sums[: len(mine)].tolist()]


def _in_order(headers: Tensor, share: Share, leaves: int, first: int) -> Tensor:
    """The entries of all micro-batches, in order of k, from the ranks' columns that begin at ``first``."""
    numbers = [[k for k in share.of(leaves, holder) if k < leaves] for holder in range(share.holders)]
    if len(numbers) == 1:
        return headers[0, first : first + leaves]
    entries = torch.cat([row[first : first + len(part)] for row, part in zip(headers, numbers)])
    if not (share.interleaved or share.rounds):
        return entries
    order = torch.tensor([k for part in numbers for k in part], device=headers.device)
    return torch.empty_like(entries).index_copy_(0, order, entries)
