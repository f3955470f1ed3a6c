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

from lockstep.buffers import RunningBuffers
from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.strategies.absent import absent_parameters_explained
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.elementwise import require_elementwise
from lockstep.strategies.fsdp.exchange import CountedAllGather, OrderedReduceScatter
from lockstep.strategies.fsdp.holding import Holding
from lockstep.strategies.fsdp.parameters import UseCounter
from lockstep.strategies.fsdp.units import shard
from lockstep.strategies.rows import require_rows
from lockstep.strategy_options import FsdpOptions
from lockstep.sums import fold_rows
from lockstep.tree import TreeStack


class FullyShardedDataParallel(Strategy):
    """Shares parameters, gradients and optimizer state out over the ranks of a group.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        group: the ranks.
        options: of the strategy.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "fsdp"
    replicated = False

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        group: dist.ProcessGroup,
        options: FsdpOptions,
        running_buffers: Sequence[str] = (),
    ) -> None:
        if options.cpu_offload and device.type == "cpu":
            raise ConfigError(
                "fsdp.cpu_offload moves parameters from a GPU to the host; on CPUs leave it out."
            )
        self.device, self._group, self._options = device, group, options
        self._ranks = dist.get_world_size(group)
        self.share = Share(holders=self._ranks, holder=dist.get_rank(group), rounds=True)
        self.level = Level.TOLERANCE if options.mixed_precision else Level.BITWISE
        self._declared, self._checked = running_buffers, False
        self._longest = self.share.longest(micro_batches)

    def place(self, model: nn.Module) -> nn.Module:
        """Shares the parameters out and frees the rest. Collective."""
        require_rows(model, self.name)
        self._holding = Holding(model, self._group, self.device)
        model.to(self.device)
        self._buffers = RunningBuffers(model, self._declared)
        modules = shard(model, self._group, self.device, self._options)
        self._exchanges = [OrderedReduceScatter(self._group) for _ in modules]
        self._gathering = CountedAllGather()
        for exchange, module in zip(self._exchanges, modules.values()):
            exchange.install(module)
            self._gathering.install(module)
        parameters = self._holding.find()
        self._trained = [each for each in parameters.values() if each.sharded.requires_grad]
        UseCounter(parameters, modules)
        return model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's micro-batches, round by round. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        prior = [(each.held, each.held.grad) for each in self._trained if each.held.grad is not None]
        self._begin(leaves)
        header = torch.zeros(self._header_size, dtype=torch.float64, device=self.device)
        values = torch.zeros(
            self._longest, self._buffers.numel, dtype=self._buffers.dtype, device=self.device
        )
        for place, micro_batch in enumerate(batch.micro_batches):
            self._buffers.begin_micro_batch()
            with absent_parameters_explained(self.name):
                loss, weight = compute(micro_batch)
            if self._buffers.numel and micro_batch.k < leaves:
                values[place], advanced = self._buffers.take()
                header[self._counters] += advanced
            counts = [each.used for each in self._trained]
            with absent_parameters_explained(self.name):
                (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub
            self._find_places()
            if micro_batch.k >= leaves:
                for each, count in zip(self._trained, counts):
                    each.used = count
                continue
            header[place], header[self._longest + place] = loss.detach(), weight
        return self._finish(header, values, leaves, stop, prior)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all ranks, shape (ranks, n). Collective."""
        rows = torch.empty(self._ranks, row.numel(), dtype=row.dtype, device=row.device)
        all_gather_flat(rows.view(-1), row.contiguous(), self._group)
        return rows

    def release(self) -> None:
        """See ``Strategy.release``."""
        let_go_of_groups(self, self._holding, *self._exchanges)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of each trained parameter, as ordinary parameters."""
        return {each.name: each.held for each in self._trained}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizers whose update of an element depends on others: they would see this rank's rows only."""
        require_elementwise(optimizer, self.name)

    def squares(self) -> Tensor:
        """See ``Strategy.squares``."""
        return self._holding.squares()

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks. Collective."""
        found = flags.clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, gathered one at a time, and buffers. Collective."""
        return self._holding.state()

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter; buffers from rank 0."""
        return self._holding.own_rows()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows, and all buffers."""
        self._holding.load(state)

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.whole``."""
        assert part is not None, f"every rank holds rows of {name!r}"
        return self._holding.whole(name, part)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return self._holding.part(whole)

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``: gradients, and parameters that are gathered."""
        return self._gathering.bytes_sent + sum(exchange.bytes_sent for exchange in self._exchanges)

    @property
    def _counters(self) -> slice:
        start = 2 * self._longest + len(self._trained)
        return slice(start, start + self._buffers.counters)

    @property
    def _header_size(self) -> int:
        """[losses, weights] of this rank's micro-batches, uses of parameters, advances of counters, stop, finite."""
        return 2 * self._longest + len(self._trained) + self._buffers.counters + 2

    def _begin(self, leaves: int) -> None:
        self._buffers.begin_step()
        if not self._checked:
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
        header: Tensor,
        values: Tensor,
        leaves: int,
        stop: int,
        prior: list[tuple[nn.Parameter, Tensor]],
    ) -> StepResult:
        totals = [exchange.take() for exchange in self._exchanges]
        sums = [total.sum() for total in totals if total is not None]
        header[2 * self._longest : self._counters.start] = torch.tensor(
            [each.used for each in self._trained], dtype=torch.float64
        )
        header[-2] = float(stop)
        header[-1] = float(bool(sums) and not bool(torch.stack(sums).isfinite().all()))
        headers = self.gather(header)
        order = torch.arange(leaves, device=self.device)
        losses = headers[order % self._ranks, order // self._ranks]
        weight = fold_rows(headers[order % self._ranks, self._longest + order // self._ranks])
        uses = headers[:, 2 * self._longest : self._counters.start].sum(0).tolist()
        self._set_gradients(totals, uses, weight.float(), prior)
        self._set_buffers(headers, values, leaves)
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        finite = (losses.sum().isfinite()) & (headers[:, -1].max() == 0)
        return StepResult(fold_rows(losses) / weight, losses, headers[:, -2].max(), finite)

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
        for parameter, before in prior:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _set_buffers(self, headers: Tensor, values: Tensor, leaves: int) -> None:
        if not self._buffers.numel:
            return
        rows = torch.empty(self._ranks, *values.shape, device=self.device)
        all_gather_flat(rows.view(-1), values.view(-1), self._group)
        stack = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        for k in range(leaves):
            stack.push_leaf(k, rows[k % self._ranks, k // self._ranks])
        (total,) = stack.take().values()
        self._buffers.finish_step(total, leaves, headers[:, self._counters].sum(0))
