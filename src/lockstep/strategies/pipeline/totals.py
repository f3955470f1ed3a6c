"""Sums and state of a pipeline's stages: losses, gradients, running statistics, and the tensors of the full model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.plan import Share
from lockstep.core.summation_tree import TreeStack, fold_rows, sum_of_squares
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import BucketShape, Reducer
from lockstep.reduce.reducer import most_slots
from lockstep.strategies.gradients import GradientTree, StepHeader
from lockstep.strategies.pipeline.channels import PipelineChannel
from lockstep.strategies.pipeline.stage import PipelineChannels

_KIND = "losses"
"""The kind of what the last stage tells the others."""


class Losses:
    """A row [losses, weights] of one holder, and what the rows of all holders come to.

    Args:
        share: which micro-batches this holder runs.
        micro_batches: K of the recipe.
        device: of the stages.
        channels: to the holder's other ranks on the last one, from the last one on the others.
        is_last: whether this rank has the last stage.
    """

    def __init__(
        self,
        share: Share,
        micro_batches: int,
        device: torch.device,
        channels: Sequence[PipelineChannel],
        *,
        is_last: bool,
    ) -> None:
        self._header = StepHeader(share, micro_batches)
        self._device, self._channels, self._is_last = device, channels, is_last
        self._longest = share.longest(micro_batches)
        self.size = self._header.size
        """Size of a row."""

    def begin(self, count: int) -> None:
        """Starts a step in which this holder runs so many micro-batches."""
        self._row = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        self._count = count

    def put(self, place: int, loss: Tensor, weight: Tensor) -> None:
        """Keeps what the last stage has computed of the holder's micro-batch number ``place``; both are 0-dim."""
        self._row[place], self._row[self._longest + place] = loss.detach(), weight

    def tell(self, place: int) -> None:
        """Sends the row to the holder's other ranks if micro-batch number ``place`` was its last."""
        if place == self._count - 1:
            for channel in self._channels:
                channel.send(_KIND, self._row)

    def told(self) -> Tensor:
        """The row, on every rank of the holder."""
        if not self._count or self._is_last:
            return self._row
        (channel,) = self._channels
        return channel.receive(_KIND)[1][0]

    def flush(self) -> None:
        """Waits until all that was told has arrived."""
        for channel in self._channels:
            channel.flush()

    def of_all(self, rows: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
        """The losses of all micro-batches, float64, shape (leaves,), and the weight of the global batch, 0-dim.

        Args:
            rows: of all holders, shape (holders, size).
            leaves: number of micro-batches in the step.
        """
        return self._header.losses(rows, leaves), fold_rows(self._header.weights(rows, leaves))


class Totals:
    """The sums over a stage's micro-batches.

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
        """Ends the backward pass of a micro-batch; they run in order of ``k``."""
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
        self._buffers.refuse_changed_others()
        return parts


class StageState:
    """The tensors of a whole model by name, each with the place of the rank that keeps it."""

    def __init__(
        self, model: nn.Module, parts: Sequence[Sequence[nn.Module]], mine: range, channels: PipelineChannels
    ) -> None:
        self._channels = channels
        stage_of = {
            id(tensor): number
            for number, modules in enumerate(parts)
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        state = model.state_dict(keep_vars=True)
        self._keeper = {name: stage_of[id(tensor)] % channels.length for name, tensor in state.items()}
        self._specs = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        self._trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
        self._others = [module for n, modules in enumerate(parts) if n not in mine for module in modules]
        self._held: dict[str, Tensor] = {}

    def keep(self, stages: Sequence[nn.Module]) -> None:
        """Notes what is held here, in stages on their device, and gives the memory of all other stages back."""
        self._held = {
            name: tensor.detach()
            for stage in stages
            for name, tensor in stage.state_dict(keep_vars=True).items()
        }
        for module in self._others:
            module.to("meta")
        self._others = []

    def is_mine(self, name: str) -> bool:
        """Returns whether a parameter or buffer is held here."""
        return self._keeper[name] == self._channels.place

    def state(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the whole model in turn, on every rank. Collective over the pipeline."""
        for name, spec in self._specs.items():
            yield name, self.give(name, self._held.get(name), spec.dtype, device)

    def own_rows(self, holder: int) -> dict[str, Tensor]:
        """The tensors that one of the ranks with the same stages writes to a checkpoint."""
        return dict(self._held) if holder == 0 else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values of what is held here from whole tensors."""
        with torch.no_grad():
            for name, tensor in self._held.items():
                tensor.copy_(state[name])

    def give(self, name: str, part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that is held as the parameter ``name`` is, on every rank. Collective over the pipeline."""
        if self.is_mine(name):
            if part is None:
                raise ConfigError(
                    f"The rank of the stage of {name!r} holds no tensor of that name. Please report this as a bug."
                )
            packed = part.detach().contiguous()
        else:
            packed = torch.empty(self._specs[name].shape, dtype=dtype, device=device)
        dist.broadcast(packed, self._channels.ranks[self._keeper[name]], group=self._channels.group)
        return part.detach() if self.is_mine(name) and part is not None else packed

    def squares(self, trainable: Mapping[str, nn.Parameter], device: torch.device) -> Tensor:
        """The sum of squares of each trained parameter's gradient, zero for those of others. float64, in name order."""
        found = [
            sum_of_squares(trainable[name].grad)  # type: ignore[arg-type]  # asked in the same line
            if name in trainable and trainable[name].grad is not None
            else None
            for name in self._trained
        ]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([zero if each is None else each for each in found] or [zero])
