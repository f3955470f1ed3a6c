"""Tensor parallel: a layer's outputs, and the next layer's inputs, are shared out over the ranks.

                 shard 0, on rank 0                    shard 1, on rank 1
    x            whole                                 whole, equal bits
    column       W1[:n/2] x    -> activation           W1[n/2:] x    -> activation
    row          W2[:, :n/2] h                         W2[:, n/2:] h
    y            sum of both + b2                      sum of both + b2, equal bits

The number of shards P belongs to the recipe where ``tensor.shards`` gives it, and a rank may hold several: the bits are
then those of any number of ranks, also of one. Without it there is a shard for each rank.

All ranks of the axis compute the same micro-batches, so everything between split layers is computed on each of them,
from equal bits. That is checked in every step: a replicated gradient or loss that differs is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import tensor_state
from lockstep.config.strategy_options import Level, TensorOptions
from lockstep.core.fingerprint import sum_of_bits
from lockstep.core.summation_tree import fold_rows, sum_of_squares
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.process_group import Groups
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError, ReplicaError
from lockstep.numerics.compilation import is_compiled
from lockstep.numerics.hooks import hooks_made
from lockstep.reduce import Reducer
from lockstep.strategies.absent import Absence, AbsentParameter, computing, held_of
from lockstep.strategies.ddp import Replicated
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.strategy import STOP_CODES, Compute, StepResult
from lockstep.strategies.tensor.layers import Exchange, Splitter, refuse_hooks, shards_of
from lockstep.strategies.tensor.plans import (
    SplitWays,
    between,
    check_plan,
    deciding,
    is_to_be_checked,
    plan_of,
)


class TensorParallel(Replicated):
    """Shares layers out over the axis ``tensor`` of a mesh, and micro-batches over the axis ``data``.

    Args:
        between: exchanges of the ranks that share the layers; None for one.
        reducer: sums gradients over the axis ``data``; None where that has one rank.
    """

    name = "tensor"
    replicated = False
    computes_together = True
    replaces_parameters = True
    largest_unit = Unit.PLACE
    cut_dimensions = 2

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        groups: Groups,
        between: RankExchange | None,
        options: TensorOptions,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(device, micro_batches, reducer, groups.along("data"))
        ranks = 1 if between is None else between.ranks
        self._exchange, self._options = Exchange(between, options.shards or ranks), options
        self._exchange.begin = self.require_joint_call
        self.absences = [Absence(self.name, "each rank has a part of it")]
        self._hooks_seen = -1
        self._is_split: Tensor | None = None
        self._deciding: dict[str, object] = {}
        self._compared: SplitWays | None = None
        """The ways of split activations in the forwards that were compared with the whole model's."""
        self._is_changed = False
        """True in a step before which the loop has changed what decides these ways."""
        self._watching, self._later = ExitStack(), SplitWays({}, {})
        self._is_evaluation_changed = False
        """The same in an evaluation, until its first forward pass."""
        promised = Level.BITWISE if reducer is None else reducer.level
        self.level = promised if options.shards or promised is Level.STATISTICAL else Level.TOLERANCE
        if self.level is Level.BITWISE:  # on each number of ranks the optimizer sees other parts
            self.largest_unit = Unit.ELEMENT

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this holder's micro-batches together with the other ranks of its line. See ``Strategy.backward``."""
        if self._hooks_seen != hooks_made():
            refuse_hooks(self._split | self._between)
            self._hooks_seen = hooks_made()
        if self.reference is not None and batch.micro_batches:
            whole = tensor_state(self.reference)
            with torch.no_grad():
                for name, tensor in self.state():  # since run.prepare a resume, or the script, has set them
                    whole[name].copy_(tensor)
            self._compared = None if any(map(is_compiled, self._model.modules())) else self._new_ways()
            with super().joined_calls(), self._compared or nullcontext():
                parts = batch.micro_batches
                check_plan(self.reference, self._model, self._exchange, self._buffers, parts, compute)
            self.reference, self._deciding = None, deciding(self._model, self._plan)
        elif self._compared is not None:
            before, self._deciding = self._deciding, deciding(self._model, self._plan)
            self._is_changed = self._deciding != before
        self._freeze_parts()
        try:
            with self._watching, computing(self.absences), super().joined_calls():
                return self._agree(super().backward(batch, compute, scale=scale, stop=stop))
        except RuntimeError as error:  # as of shapes that do not fit
            self._require_split_layers(error)
            raise
        finally:
            self._is_changed = False

    def begin_forward(self) -> None:
        """See ``Replicated.begin_forward``; watches the forward pass where what decides it has changed."""
        super().begin_forward()
        if self._is_changed:
            self._later = self._watching.enter_context(self._new_ways())

    def end_forward(self, micro_batch: MicroBatch, loss: Tensor, weight: Tensor, scale: float) -> None:
        """See ``Replicated.end_forward``."""
        self._watching.close()
        if self._compared is not None:
            self._later.require_in(self._compared)
        super().end_forward(micro_batch, loss, weight, scale)

    def require_no_calls(self) -> None:
        """Called where an evaluation begins: notes whether the loop has changed what decides its forward passes."""
        is_compared = self._compared is not None
        self._is_evaluation_changed = is_compared and deciding(self._model, self._plan) != self._deciding

    @contextmanager
    def joined_calls(self) -> Iterator[None]:
        """See ``Strategy.joined_calls``; watches the first forward pass of an evaluation where these have changed."""
        compared, is_changed = self._compared, self._is_evaluation_changed
        self._is_evaluation_changed = False
        with super().joined_calls(), self._new_ways() if is_changed else nullcontext(SplitWays({}, {})) as ways:
            yield
        if compared is not None:
            ways.require_in(compared)

    def _new_ways(self) -> SplitWays:
        return SplitWays(self._split, self._plan)

    def _require_split_layers(self, error: Exception) -> None:
        """Raises ``ConfigError`` in place of an error where a layer that was split is no longer in the model."""
        there = dict(self._model.named_modules(remove_duplicate=False))
        for name, module in self._split.items():
            if there.get(name) is not module:
                raise ConfigError(
                    f"The module {name!r} of the model was replaced or taken out after run.prepare, and strategy "
                    "'tensor' has split it together with others. Change modules before run.prepare."
                ) from error

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        if self._exchange.between is not None:
            self._exchange.between.release()

    def squares(self) -> Tensor:
        """See ``Strategy.squares``; shards are added in the tree over all of them."""
        held, names = self._exchange.held, sorted(self._trainable)
        sums = torch.zeros(held, max(1, len(names)), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            gradient, shard = self._trainable[name].grad, self._shards.get(name)
            if gradient is None:
                continue
            parts = [gradient] if shard is None else shards_of(gradient, shard.dim, held, shard.blocks)
            for row, part in zip(sums, parts):
                row[place] = sum_of_squares(part)
        rows = self._exchange.gather(sums)
        if self._is_split is None:
            is_split = [name in self._shards for name in names] or [False]
            self._is_split = torch.tensor(is_split, device=self.device)
        return torch.where(self._is_split, fold_rows(rows), rows[0])

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks that share the layers. Collective."""
        return self._exchange.largest(flags)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers, the split ones gathered one at a time. Collective."""
        for name, tensor in tensor_state(self._model).items():
            held = held_of(tensor).detach()
            yield name, self.gather_full(name, held, held.dtype)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's parts."""
        with torch.no_grad():
            for name, tensor in tensor_state(self._model).items():
                held_of(tensor).copy_(self.local_shard(name, state[name]))

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``."""
        assert part is not None, f"every rank holds a part of {name!r}"
        shard = self._shards.get(name)
        return part if shard is None else shard.gather(part.detach().to(self.device), self._exchange)

    def local_shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part."""
        shard = self._shards.get(name)
        return whole if shard is None else shard.local_shard(whole)

    @property
    def all_bytes_sent(self) -> int:
        """Bytes of gradients given to others over ``data``, and of activations over ``tensor``."""
        return super().all_bytes_sent + self._exchange.bytes_sent

    def _move(self, model: nn.Module) -> nn.Module:
        """Splits the layers of the plan, then moves what is left to the device."""
        plan = self._plan = plan_of(model, self._options.plan)
        self._split = {name: model.get_submodule(name) for name in plan}
        self._between = between(model, plan)
        if self._options.plan or is_to_be_checked(model, plan):
            self.reference = deepcopy(model).to(self.device)
        self._shards = Splitter(model, self._exchange, self.device, self.absences[0]).split(plan)
        self._absent = [each for each in model.parameters() if isinstance(each, AbsentParameter)]
        return model

    def _freeze_parts(self) -> None:
        """Freezes the parts, with which the layers compute, where the user has frozen the whole parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            for whole in self._absent:
                if whole.parameter_rows is not None:
                    whole.parameter_rows.requires_grad_(whole.requires_grad)

    def _find_trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """This rank's parts of split parameters, in place of these, and the other parameters whole."""
        return {name: held_of(p) for name, p in model.named_parameters() if p.requires_grad}

    def _agree(self, result: StepResult) -> StepResult:
        """One result for all ranks that share the layers; an error where what they all compute differs. Collective."""
        if self._exchange.between is None:
            return result
        replicated = {name: p for name, p in self._trainable.items() if name not in self._shards}
        sums = [
            sum_of_bits(p.grad) if p.grad is not None else torch.full((), -1, dtype=torch.int64, device=self.device)
            for p in replicated.values()
        ]
        flags = torch.stack([result.stop.double(), result.finite.double()])
        row = torch.cat([flags, result.losses.double()]).view(torch.int64)
        rows = self._exchange.between.all_gather(torch.cat([row, *([torch.stack(sums)] if sums else [])]))
        shared = rows[:, :2].contiguous().view(torch.float64)
        finite = shared[:, 1].amin() > 0
        differs = (rows[:, 2:] != rows[0, 2:]).any(0)
        stops = shared[:, 0]
        is_one_step = stops.amax() - stops.amin() < STOP_CODES  # of another one, the run tells
        if bool(finite & is_one_step & differs.any()):
            first = int(differs.nonzero()[0])
            names = ["the loss"] * result.losses.numel() + [f"the gradient of {name!r}" for name in replicated]
            raise ReplicaError(
                f"{names[first]} differs between ranks that share the model's layers and compute it from the same "
                "bits: a parameter was changed on one of them only, or the model draws random numbers without a key."
            )
        return replace(result, stop=stops.amax(), finite=finite)
