"""Tensor parallel: a layer's outputs, and the next layer's inputs, are shared out over the ranks.

                 rank 0                                rank 1
    x            whole                                 whole, equal bits
    column       W1[:n/2] x    -> activation           W1[n/2:] x    -> activation
    row          W2[:, :n/2] h                         W2[:, n/2:] h
    y            sum of both + b2                      sum of both + b2, equal bits

All ranks of the axis compute the same micro-batches, so everything between split layers is computed on each of them,
from equal bits. That is checked in every step: a replicated gradient or loss that differs is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.errors import ReplicaError
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.reduce import Reducer
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.elementwise import require_elementwise
from lockstep.strategies.groups import Groups
from lockstep.strategies.replicated import Replicated
from lockstep.strategies.tensor.exchange import Exchange
from lockstep.strategies.tensor.plans import plan_of
from lockstep.strategies.tensor.proof import PlanProof
from lockstep.strategies.tensor.splitting import Splitter
from lockstep.strategy_options import TensorOptions
from lockstep.sums import fold_rows, sum_of_squares

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorParallel(Replicated):
    """Shares layers out over the axis ``tensor`` of a mesh, and micro-batches over the axis ``data``.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        groups: of the mesh; the axis ``tensor`` has more than one rank.
        options: the plan.
        reducer: sums gradients over the axis ``data``; None where that has one rank.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "tensor"
    replicated = False

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        groups: Groups,
        options: TensorOptions,
        reducer: Reducer | None = None,
        running_buffers: Sequence[str] = (),
    ) -> None:
        share = Share(holders=groups.size("data"), holder=groups.coordinate("data"))
        super().__init__(device, micro_batches, reducer, share, running_buffers)
        group = groups.along("tensor")
        assert group is not None, "one rank is no tensor parallel"
        self._exchange, self._data, self._options = Exchange(group), groups.along("data"), options
        self._proof: PlanProof | None = None
        statistical = reducer is not None and reducer.level is Level.STATISTICAL
        self.level = Level.STATISTICAL if statistical else Level.TOLERANCE

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this holder's micro-batches together with the other ranks of its line. See ``Strategy.backward``."""
        if self._proof is not None and batch.micro_batches:
            self._proof.check(self._model, self._buffers, batch.micro_batches, compute)
            self._proof = None
        return self._agree(super().backward(batch, compute, scale=scale, stop=stop))

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all data-parallel holders, shape (holders, n). Collective."""
        if self._data is None:
            return super().gather(row)
        rows = torch.empty(self.share.holders, row.numel(), dtype=row.dtype, device=row.device)
        all_gather_flat(rows.view(-1), row.contiguous(), self._data)
        return rows

    def release(self) -> None:
        """See ``Strategy.release``."""
        let_go_of_groups(self, self._exchange)
        if self._reducer is not None:
            self._reducer.release()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizers whose update of an element depends on others: they would see this rank's part only."""
        require_elementwise(optimizer, self.name)

    def squares(self) -> Tensor:
        """See ``Strategy.squares``; parts are added over the ranks in order."""
        names = sorted(self._trainable)
        sums = torch.zeros(max(1, len(names)), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            gradient = self._trainable[name].grad
            if gradient is not None:
                sums[place] = sum_of_squares(gradient)
        rows = self._exchange.gather(sums)
        cut = torch.tensor([name in self._cuts for name in names] or [False], device=self.device)
        return torch.where(cut, fold_rows(rows), rows[0])

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks that share the layers. Collective."""
        return self._exchange.gather(flags.reshape(-1)).amax(0).view(flags.shape)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers, the split ones gathered one at a time. Collective."""
        for name, tensor in super().state():
            yield name, self.whole(name, tensor, tensor.dtype)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's parts."""
        super().load_state({name: self.part(name, tensor) for name, tensor in state.items()})

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.whole``."""
        assert part is not None, f"every rank holds a part of {name!r}"
        cut = self._cuts.get(name)
        return part if cut is None else cut.gather(part.detach().to(self.device), self._exchange.group)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds."""
        cut = self._cuts.get(name)
        return whole if cut is None else cut.part(whole)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients given to others over ``data``, and of activations over ``tensor``."""
        return super().bytes_sent + self._exchange.bytes_sent

    def _move(self, model: nn.Module) -> nn.Module:
        """Splits the layers of the plan, then moves what is left to the device."""
        plan = plan_of(model, self._options.plan)
        if self._options.plan:
            self._proof = PlanProof(deepcopy(model).to(self.device), self._exchange)
        self._cuts = Splitter(model, self._exchange).split(plan)
        return model.to(self.device)

    def _agree(self, result: StepResult) -> StepResult:
        """One result for all ranks that share the layers; an error where what they all compute differs. Collective."""
        replicated = {name: p for name, p in self._trainable.items() if name not in self._cuts}
        sums = [_bits(p.grad, self.device) for p in replicated.values()]
        flags = torch.stack([result.stop.double(), result.finite.double()])
        row = torch.cat([flags, result.losses.double()]).view(torch.int64)
        rows = self._exchange.gather(torch.cat([row, torch.stack(sums)]) if sums else row)
        shared = rows[:, :2].contiguous().view(torch.float64)
        finite = shared[:, 1].amin() > 0
        differs = (rows[:, 2:] != rows[0, 2:]).any(0)
        if bool(finite & differs.any()):
            first = int(differs.nonzero()[0])
            names = ["the loss"] * result.losses.numel() + [
                f"the gradient of {name!r}" for name in replicated
            ]
            raise ReplicaError(
                f"{names[first]} differs between ranks that share the model's layers and compute it from the same "
                "bits: a parameter was changed on one of them alone, or the model draws numbers that are not keyed."
            )
        return replace(result, stop=shared[:, 0].amax(), finite=finite)


def _bits(gradient: Tensor | None, device: torch.device) -> Tensor:
    """A sum over the bits of a gradient, int64, 0-dim: equal where all bits are."""
    if gradient is None:
        return torch.full((), -1, dtype=torch.int64, device=device)
    bits = gradient.detach().contiguous().view(_INTEGERS[gradient.element_size()])
    return bits.sum(dtype=torch.int64)
