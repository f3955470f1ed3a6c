"""Sums of activations over the ranks that share a layer, with the same bits on each of them.

    all_to_all of pieces -> add the ranks' pieces in the tree's order -> all_gather

The backend only moves bytes, so the sum depends on the number of ranks alone, and what comes after it on every rank is
computed from equal bits: replicated parameters cannot drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.summation_tree import fold_rows
from lockstep.distributed.collectives import all_gather_flat

_HALVES = (torch.bfloat16, torch.float16)


class Exchange:
    """The ranks of one line of the axis ``tensor``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.bytes_sent = 0
        """Bytes of activations and their gradients this rank has given to others."""

    def enter(self, x: Tensor) -> Tensor:
        """``x`` itself, where a split layer begins; in backward, its gradient is summed. Collective in backward."""
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]  # torch's stub
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, where a split layer ends. Collective in forward."""
        left: Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]  # torch's stub
        return left

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of equal bits on each; half precision is added in float32. Collective."""
        flat = x.contiguous().view(-1)
        piece = -(-flat.numel() // self.ranks)
        given = flat.new_zeros(self.ranks * piece)
        given[: flat.numel()] = flat
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=self.group)
        rows = received.view(self.ranks, piece)
        mine = fold_rows(rows.float() if rows.dtype in _HALVES else rows).to(x.dtype)
        all_gather_flat(given, mine.contiguous(), self.group)
        self.bytes_sent += 2 * (self.ranks - 1) * piece * x.element_size()
        return given[: flat.numel()].view(x.shape)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
