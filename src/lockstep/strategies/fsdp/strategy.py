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
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.config.strategy_options import FsdpOptions, Level
from lockstep.core.plan import Share
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_gather_rows, all_reduce_max, drop_process_groups
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.fsdp.exchange import CountedAllGather, OrderedReduceScatter, shard
from lockstep.strategies.gradients import StepHeader, add_prior
from lockstep.strategies.sharding import (
    explain_missing_parameters,
    gather_rows,
    require_rows,
    rows_of,
    squares_of_rows,
)
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class ShardedParameter:
    """One parameter.

    Args:
        name: its first name in the whole model.
        sharded: FSDP2's; its rows of this rank are never moved.
        shape: of the whole.
    """

    def __init__(self, name: str, sharded: DTensor, shape: torch.Size) -> None:
        self.name, self.sharded, self.shape = name, sharded, shape
        rows = sharded.detach().to_local()  # type: ignore[attr-defined]  # a DTensor
        self.held = nn.Parameter(rows, requires_grad=sharded.requires_grad)
        """An ordinary parameter on the very memory of this rank's rows: optimizers step it without DTensor."""
        self.place: tuple[int, int] | None = None
        """Number of its exchange, and where in the flat sum it begins; known after the first backward pass."""
        self.used = 0
        """In how many of the step's micro-batches of this rank it had a gradient."""


def count_uses(parameters: Mapping[str, ShardedParameter], modules: Mapping[str, FSDPModule]) -> None:
    """Counts in which micro-batches parameters had a gradient.

    FSDP2 makes the whole parameters at the first forward pass and keeps the objects, so they get a hook then.
    """
    waiting = {name for name, p in parameters.items() if p.sharded.requires_grad}

    def watch(prefix: str, unit: nn.Module, arguments: object) -> None:
        for name, parameter in unit.named_parameters(prefix) if waiting else ():
            if name in waiting and not isinstance(parameter, DTensor):
                waiting.discard(name)
                parameter.register_post_accumulate_grad_hook(partial(note_use, parameters[name]))  # type: ignore[no-untyped-call]  # torch's stub

    def note_use(sharded: ShardedParameter, _: Tensor) -> None:
        sharded.used += 1

    for prefix, module in modules.items():
        assert isinstance(module, nn.Module)
        module.register_forward_pre_hook(partial(watch, prefix))  # after FSDP2's own, which gathers


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
        self._model = model.to(self.device)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._first_names = _first_names(model)
        self._buffers = RunningBuffers(model, self._declared)
        modules = shard(model, self._group, self.device, self._options)
        self._exchanges = [OrderedReduceScatter(self._group) for _ in modules]
        self._gathering = CountedAllGather()
        for exchange, module in zip(self._exchanges, modules.values()):
            exchange.install(module)
            self._gathering.install(module)
        self._parameters: dict[str, ShardedParameter] = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            self._parameters[name] = ShardedParameter(name, parameter, self._shapes[name])
        self._trained = [each for each in self._parameters.values() if each.sharded.requires_grad]
        count_uses(self._parameters, modules)
        self._header = StepHeader(
            self.share, self._micro_batches, len(self._trained), self._buffers.counters, flags=2
        )
        return model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's micro-batches, round by round. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        prior = [(each.held, each.held.grad) for each in self._trained if each.held.grad is not None]
        self._buffers.begin_step()
        self._buffers.remember_others()
        for exchange in self._exchanges:
            exchange.begin(leaves)
        for each in self._trained:
            each.used = 0
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
        drop_process_groups(self, *self._exchanges)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of each trained parameter, as ordinary parameters."""
        return {each.name: each.held for each in self._trained}

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: every rank squares its rows, and all fold the rows of each parameter alike."""
        trained = sorted(self._trained, key=lambda each: each.name)
        rows = [each.shape[0] for each in trained]
        sums = squares_of_rows([each.held.grad for each in trained], rows, self.device, self._group)
        return torch.stack(sums or [torch.zeros((), dtype=torch.float64, device=self.device)])

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks. Collective."""
        return all_reduce_max(flags, self._group)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, gathered one at a time, and buffers. Collective."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for name, first in self._first_names.items():
            if first:
                held = self._parameters[first].held.detach()
                yield name, self.gather_full(first, held, held.dtype)
            else:
                yield name, buffers[name]

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter where it has some; what has none at all, and buffers, on rank 0."""
        first = dist.get_rank(self._group) == 0
        found = {n: p.held.detach() for n, p in self._parameters.items() if first or p.held.numel()}
        buffers = dict(self._model.named_buffers(remove_duplicate=False)) if first else {}
        return found | {name: buffers[name] for name in self._first_names if name in buffers}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows, and all buffers."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, first in self._first_names.items():
                if first:
                    self._parameters[first].held.copy_(self.local_shard(first, state[name]))
                else:
                    buffers[name].copy_(state[name])

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``."""
        assert part is not None, f"every rank holds rows of {name!r}"
        return gather_rows(part.to(self.device), self._shapes[name], self._group)

    def local_shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return whole[rows_of(whole.shape[0], self.share.holders, dist.get_rank(self._group))]

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``: gradients, and parameters that are gathered."""
        return self._gathering.bytes_sent + sum(exchange.bytes_sent for exchange in self._exchanges)

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
        losses, weight, used, advanced = self._header.unpack(headers, leaves)
        self._set_gradients(totals, used.tolist(), weight.float(), prior)
        if self._buffers.numel:
            rows = all_gather_rows(values.view(-1), self._group).view(-1, *values.shape)
            self._buffers.finish_step_from_rows(rows, self.share, leaves, advanced)
        self._buffers.refuse_changed_others()
        finite = (losses.sum().isfinite()) & (self._header.flag(headers, 1) == 0)
        return StepResult(fold_rows(losses) / weight, losses, weight, self._header.flag(headers), finite)

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
            number, start = each.place or (0, 0)
            total = totals[number] if count and each.place is not None else None
            if total is not None:
                total = total[start : start + each.held.numel()].view(each.held.shape).to(each.held.device)
            each.held.grad = total
        add_prior(prior)


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of the parameter under each name of the model's state; "" for a buffer."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first.get(value, "") for name, value in model.state_dict(keep_vars=True).items()}
