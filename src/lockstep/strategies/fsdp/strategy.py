"""Fully sharded data parallel.

    held          rank 0: rows 0..n/2 of every parameter, its gradient and its optimizer state; rank 1: the other rows
    forward       gather a block's parameters -> compute -> free them          ... block after block
    backward      gather -> compute -> exchange the micro-batch's gradients -> free

``gathering`` decides when parameters are whole, ``exchange`` gathers them and sums their gradients. The ranks take
micro-batches in turn (rank r has k = j * ranks + r), so that the gradients of a round are neighbours in the tree. Where
the micro-batches run out, a rank runs a spare one, which counts for nothing, so that it joins every collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.state import tensor_state
from lockstep.config.strategy_options import FsdpOptions, Level
from lockstep.core.plan import Share
from lockstep.core.summation_tree import fold_rows, sum_of_squares
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import exchange_device
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError, RankError
from lockstep.numerics.compilation import compiled_around
from lockstep.numerics.initial_values import move_model
from lockstep.numerics.precision import all_finite
from lockstep.numerics.running_buffers import RunningBuffers, has_batch_norm
from lockstep.runtime.torch_internals import NO_SAVED_TENSORS_HOOKS
from lockstep.strategies.fsdp.gathering import Gathering
from lockstep.strategies.gradients import StepHeader, add_prior, aligned_gradient, run_backward
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.sharding import (
    gather_rows,
    require_plain_state,
    require_rows,
    squares_of_rows,
    watching_writes,
)
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class FullyShardedDataParallel(Strategy):
    """Shares parameters, gradients and optimizer state out over the ranks of a group."""

    name = "fsdp"
    replicated = False
    replaces_parameters = True
    largest_unit = Unit.ELEMENT
    keeps_whole = True
    fills_model = True

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        group: dist.ProcessGroup,
        exchange: RankExchange,
        options: FsdpOptions,
    ) -> None:
        self.device, self._group, self._exchange, self._options = device, group, exchange, options
        self.share = Share(holders=dist.get_world_size(group), holder=dist.get_rank(group), rounds=True)
        # The CPU's arithmetic, which updates what is offloaded, rounds otherwise than the GPU's.
        rounds = options.mixed_precision or options.cpu_offload
        self.level = Level.TOLERANCE if rounds else Level.BITWISE
        self.model_group = group
        self._micro_batches = micro_batches

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Shares the parameters out and frees the rest. Collective."""
        require_rows(model, self.name, permuted=True)
        require_plain_state(model, self.name)
        _require_uncompiled_calls(model)
        self._model = move_model(model, self.initial_values, self.device)
        self._buffers = RunningBuffers(model, self.running_buffers)
        options = self._options
        if options.mixed_precision and has_batch_norm(model):
            raise ConfigError(
                f"fsdp.mixed_precision={options.mixed_precision!r} casts BatchNorm's weights and not its statistics, "
                f"which torch cannot compute with. Use precision={options.mixed_precision!r} instead, which is level A."
            )
        self._gathering = Gathering(
            model,
            self._exchange,
            self.device,
            exchange_device(self._group, self.device),
            options,
            self.whole_parameters,
            self.initial_values,
        )
        self.absences = [self._gathering.absence]
        found = {each.whole: each for each in self._gathering.parameters}
        named = nn.Module.named_parameters(model, remove_duplicate=False)  # a model's own may not take that
        self._parameters = {name: found[p] for name, p in named}
        """By each of their names."""
        self._names = list(tensor_state(model))
        self._trained = [each for each in found.values() if each.held.requires_grad]
        self._header = StepHeader(self.share, self._micro_batches, len(self._trained), self._buffers.counters, flags=2)
        return model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's micro-batches, round by round. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        prior = [(each.held, each.held.grad) for each in self._trained if each.held.grad is not None]
        self._buffers.begin_step()
        self._buffers.remember_others()
        self._gathering.begin_step(leaves)
        losses, weights = [], []
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self.device)
        values = self._buffers.new_rows(self.share.longest(self._micro_batches))
        for place, micro_batch in enumerate(batch.micro_batches):
            self._buffers.begin_micro_batch()
            self._gathering.begin_micro_batch()
            with NO_SAVED_TENSORS_HOOKS.explained(_NO_TRANSFORMS):
                loss, weight = compute(micro_batch)
            if self._buffers.numel and micro_batch.k < leaves:
                values[place], counts = self._buffers.take()
                advanced += counts
            run_backward(loss, scale)
            self._gathering.end_micro_batch(counts=micro_batch.k < leaves)
            for call in self.events.micro_batch_end:
                call(micro_batch)
            if micro_batch.k < leaves:
                losses.append(loss.detach())
                weights.append(weight)
        totals = self._gathering.take()
        used = [each.used for each in self._trained]
        header = self._header.pack(losses, weights, used, advanced, [stop, 0.0])
        header[-1] = all_finite(totals.values(), header.device).logical_not()
        return self._finish(self.gather(header), totals, values, leaves, prior)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all ranks, shape (ranks, n). Collective."""
        return self._exchange.all_gather(row)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        self._exchange.release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of each trained parameter, as ordinary parameters; none of one that another rank holds."""
        return {each.name: each.held for each in self._trained if each.owner in (None, self.share.holder)}

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: every rank squares its rows, and all fold the rows of each parameter alike."""
        self.require_no_calls()
        trained = sorted(self._trained, key=lambda each: each.name)
        cut = [each for each in trained if each.owner is None]
        alone = [each for each in trained if each.owner is not None]
        rows = [each.shape[0] for each in cut]
        sums = squares_of_rows([each.held.grad for each in cut], rows, self.device, self._group)
        found = dict(zip((each.name for each in cut), sums))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        if alone:
            gradients = [each.held.grad for each in alone]
            own = torch.stack([zero if each is None else sum_of_squares(each).to(zero) for each in gradients])
            dist.all_reduce(own, group=self._group)  # of each entry, all but one are zero
            found |= dict(zip((each.name for each in alone), own))
        return torch.stack([found[each.name] for each in trained] or [zero])

    def require_no_calls(self) -> None:
        """See ``Strategy.require_no_calls``."""
        self._gathering.require_no_calls()

    @contextmanager
    def joined_calls(self) -> Iterator[None]:
        """See ``Strategy.joined_calls``."""
        with self._gathering.joined_calls():
            yield

    def after_step(self) -> None:
        """See ``Strategy.after_step``: what was gathered before is out of date."""
        self._gathering.free()

    def watching_writes(self) -> AbstractContextManager[set[str]]:
        """See ``Strategy.watching_writes``."""
        return watching_writes(self._gathering.blocks)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, gathered one at a time, and buffers. Collective."""
        self.require_no_calls()
        for name, held in self._held().items():
            yield name, self.gather_full(name, held.detach(), held.dtype)

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter where it has some; what has none at all, and buffers, on rank 0."""
        is_first, parameters = dist.get_rank(self._group) == 0, self._gathering.parameters
        shared = [each for each in parameters if each.held.numel() or (is_first and not each.whole.numel())]
        found = {each.name: each.held.detach() for each in shared}
        if is_first:
            found |= {name: held for name, held in self._held().items() if name not in self._parameters}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows, and all buffers."""
        with torch.no_grad():
            for name, held in self._held().items():
                held.copy_(self.local_shard(name, state[name]))

    def _held(self) -> dict[str, Tensor]:
        """This rank's rows of each parameter of the model's state, and its buffers, by all their names."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        return {
            name: self._parameters[name].held if name in self._parameters else buffers[name] for name in self._names
        }

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``."""
        if (each := self._parameters.get(name)) is None:
            return super().gather_full(name, part, dtype)
        if (owner := each.owner) is not None:
            found = torch.empty(each.shape, dtype=dtype, device=self.device)
            if part is not None and dist.get_rank(self._group) == owner:
                found.copy_(part)
            dist.broadcast(found, dist.get_process_group_ranks(self._group)[owner], self._group)
            return found
        assert part is not None, f"every rank holds rows of {name!r}"
        return gather_rows(part.to(self.device), each.shape, self._group)

    def local_shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of a parameter; a buffer as it is."""
        if name not in self._parameters:
            return whole
        return whole[self._parameters[name].rows[dist.get_rank(self._group)]]

    @property
    def all_bytes_sent(self) -> int:
        """See ``Strategy.all_bytes_sent``: gradients, and parameters that are gathered."""
        return self._gathering.bytes_sent

    def _finish(
        self,
        headers: Tensor,
        totals: Mapping[str, Tensor],
        values: Tensor,
        leaves: int,
        prior: list[tuple[nn.Parameter, Tensor]],
    ) -> StepResult:
        losses, weight, used, advanced = self._header.unpack(headers, leaves)
        divisor, uses = weight.float(), [each.used for each in self._trained]
        if not all(uses):  # only then the host waits for what the others say
            uses = used.tolist()
        for each, count in zip(self._trained, uses):
            if not count:
                each.held.grad = None
            elif (total := totals.get(each.name)) is not None:
                total.div_(divisor)
                total = aligned_gradient(total) if each.name in self.whole_parameters else total
                each.held.grad = total.to(each.held.device)
            else:
                raise RankError(
                    f"{each.name!r} was used in this step, and no gradient of it was exchanged; it would not be "
                    "trained. This is an error of Lockstep: please report it with the model."
                )
        add_prior(prior)
        if self._buffers.numel:
            self._buffers.finish_step(fold_rows(self.gather_in_order(values, leaves)), leaves, advanced)
        self._buffers.refuse_changed_others()
        # The sums are finite: so are the means, unless the weight is 0 or NaN.
        finite = losses.sum().isfinite() & divisor.reciprocal().isfinite() & (self._header.flag(headers, 1) == 0)
        return StepResult(fold_rows(losses) / weight, losses, weight, self._header.flag(headers), finite)


_NO_TRANSFORMS = (
    "The forward pass calls torch.func.grad, vjp, jacrev or hessian, and strategy 'fsdp' sets hooks on saved tensors, "
    "with which torch cannot do that. Use torch.autograd.grad(..., create_graph=True) instead, or strategy 'ddp'."
)


def _require_uncompiled_calls(model: nn.Module) -> None:
    """Raises ``ConfigError`` where a call is compiled together with the hooks around it, which gather."""
    compiled = compiled_around(model)
    for name, module in model.named_modules():
        if compiled.get(module) is module and getattr(module, "_compiled_call_impl", None) is not None:
            of_it = f"of {name!r}" if name else "of the model"
            raise ConfigError(
                f"The method compile() {of_it} compiles a call with the hooks around it, and strategy 'fsdp' gathers "
                "parameters in hooks. Use torch.compile(module), compile=True of lockstep.init, or strategy 'ddp'."
            )
