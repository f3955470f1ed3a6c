"""Fully sharded data parallel, on torch's FSDP2 (``fully_shard``).

    held          rank 0: rows 0..n/2 of every parameter, its gradient and its optimizer state; rank 1: the other rows
    forward       gather a block's parameters -> compute -> free them          ... block after block
    backward      gather -> compute -> exchange the micro-batch's gradients -> free

Parameters are gathered and freed by torch; the exchange is ours (``exchange``), and the ranks take micro-batches in
turn (rank r has k = j * ranks + r), so that the gradients of a round are neighbours in the tree. Where the
micro-batches run out, a rank runs a spare one, which counts for nothing, so that it joins every collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.strategy_options import FsdpOptions, Level
from lockstep.core.plan import Share
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_gather_rows, all_reduce_max, drop_process_groups
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.fsdp.exchange import CountedAllGather, OrderedReduceScatter, shard
from lockstep.strategies.fsdp.state import ShardedParameters, UseCounter
from lockstep.strategies.gradients import StepHeader, add_prior
from lockstep.strategies.sharding import explain_missing_parameters, require_rows
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class FullyShardedDataParallel(Strategy):
    """Shares parameters, gradients and optimizer state out over the ranks of a group.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        group: the ranks.
        options: of the strategy.
        running_buffers: see ``Replicated``.
    """

    name = "fsdp"
    replicated = False
    elementwise_only = True

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        group: dist.ProcessGroup,
        options: FsdpOptions,
        running_buffers: Sequence[str] = (),
    ) -> None:
        self.device, self._group, self._options = device, group, options
        self.share = Share(holders=dist.get_world_size(group), holder=dist.get_rank(group), rounds=True)
        self.level = Level.TOLERANCE if options.mixed_precision else Level.BITWISE
        self._declared = running_buffers
        self._micro_batches = micro_batches

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Shares the parameters out and frees the rest. Collective."""
        require_rows(model, self.name)
        self._shards = ShardedParameters(model, self._group, self.device)
        model.to(self.device)
        self._buffers = RunningBuffers(model, self._declared)
        modules = shard(model, self._group, self.device, self._options)
        self._exchanges = [OrderedReduceScatter(self._group) for _ in modules]
        self._gathering = CountedAllGather()
        for exchange, module in zip(self._exchanges, modules.values()):
            exchange.install(module)
            self._gathering.install(module)
        parameters = self._shards.find()
        self._trained = [each for each in parameters.values() if each.sharded.requires_grad]
        UseCounter(parameters, modules)
        self._header = StepHeader(
            self.share, self._micro_batches, len(self._trained), self._buffers.counters, flags=2
        )
        return model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's micro-batches, round by round. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        prior = [(each.held, each.held.grad) for each in self._trained if each.held.grad is not None]
        self._begin(leaves)
        losses, weights = [], []
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self.device)
        values = self._buffers.new_rows(self.share.longest(self._micro_batches))
        for place, micro_batch in enumerate(batch.micro_batches):
            self._buffers.begin_micro_batch()
            with explain_missing_parameters(self.name):
                loss, weight = compute(micro_batch)
            if self._buffers.numel and micro_batch.k < leaves:
                values[place], counts = self._buffers.take()
                advanced += counts
            before = [each.used for each in self._trained]
            with explain_missing_parameters(self.name):
                (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub
            self._find_places()
            for call in self.events.micro_batch_end:
                call(micro_batch)
            if micro_batch.k >= leaves:
                for each, count in zip(self._trained, before):
                    each.used = count
                continue
            losses.append(loss.detach())
            weights.append(weight)
        totals = [exchange.take() for exchange in self._exchanges]
        sums = [total.sum() for total in totals if total is not None]
        overflow = bool(sums) and not bool(torch.stack(sums).isfinite().all())
        used = [each.used for each in self._trained]
        headers = self.gather(self._header.pack(losses, weights, used, advanced, [stop, overflow]))
        return self._finish(headers, totals, values, leaves, prior)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all ranks, shape (ranks, n). Collective."""
        return all_gather_rows(row, self._group)

    def release(self) -> None:
        """See ``Strategy.release``."""
        drop_process_groups(self, self._shards, *self._exchanges)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of each trained parameter, as ordinary parameters."""
        return {each.name: each.held for each in self._trained}

    def squares(self) -> Tensor:
        """See ``Strategy.squares``."""
        return self._shards.squares()

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks. Collective."""
        return all_reduce_max(flags, self._group)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, gathered one at a time, and buffers. Collective."""
        return self._shards.state()

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter; buffers from rank 0."""
        return self._shards.own_rows()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows, and all buffers."""
        self._shards.load(state)

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``."""
        assert part is not None, f"every rank holds rows of {name!r}"
        return self._shards.gather_full(name, part)

    def local_shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return self._shards.local_shard(whole)

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``: gradients, and parameters that are gathered."""
        return self._gathering.bytes_sent + sum(exchange.bytes_sent for exchange in self._exchanges)

    def _begin(self, leaves: int) -> None:
        self._buffers.begin_step()
        self._buffers.remember_others()
        for exchange in self._exchanges:
            exchange.begin(leaves)
        for each in self._trained:
            each.used = 0

    def _find_places(self) -> None:
        """Learns once where in the flat sums each gradient lies: FSDP2 has made its own views of them."""
        for each in self._trained:
            gradient = each.sharded.grad
            if each.place is None and gradient is not None:
                local = gradient.to_local()  # type: ignore[attr-defined]  # a DTensor
                storage = local.untyped_storage().data_ptr()
                for number, exchange in enumerate(self._exchanges):
                    output = exchange.output
                    if output is not None and output.untyped_storage().data_ptr() == storage:
                        each.place = number, local.storage_offset()
            each.sharded.grad = None
        for exchange in self._exchanges:
            exchange.output = None

    def _finish(
        self,
        headers: Tensor,
        totals: list[Tensor | None],
        values: Tensor,
        leaves: int,
        prior: list[tuple[nn.Parameter, Tensor]],
    ) -> StepResult:
        losses = self._header.losses(headers, leaves)
        weight = fold_rows(self._header.weights(headers, leaves))
        used, advanced = self._header.counts(headers)
        self._set_gradients(totals, used.tolist(), weight.float(), prior)
        if self._buffers.numel:
            rows = all_gather_rows(values.view(-1), self._group).view(-1, *values.shape)
            self._buffers.finish_step_from_rows(rows, self.share, leaves, advanced)
        self._buffers.refuse_changed_others()
        finite = (losses.sum().isfinite()) & (self._header.flag(headers, 1) == 0)
        return StepResult(fold_rows(losses) / weight, losses, self._header.flag(headers), finite)

    def _set_gradients(
        self,
        totals: list[Tensor | None],
        uses: list[float],
        weight: Tensor,
        prior: list[tuple[nn.Parameter, Tensor]],
    ) -> None:
        for total in totals:
            if total is not None:
                total.div_(weight)
        for each, count in zip(self._trained, uses):
            total = totals[each.place[0]] if each.place is not None else None
            gradient = each.view(total).to(each.held.device) if count and total is not None else None
            each.held.grad = gradient
        add_prior(prior)
