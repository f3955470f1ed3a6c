"""Gradients exchanged as bfloat16: half the bytes of float32, level B.

    float32 node --round--> bfloat16 --all_to_all--> float32, folded along the tree --round--> bfloat16 --all_gather-->

Every node of the tree is rounded once before it is sent, and every sum once before it is handed out, to the nearest
number of 8 significant bits: a relative error of at most u = 2^-8 each. So an entry of the result is off by at most
2 u + u^2 (0.8 %) of the sum of its nodes' sizes, whatever the number of ranks. All ranks hold the same bits: also the
one that folded a shard takes the rounded one. The adds are those of ``OrderedReducer``, in the order of the tree.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lockstep.config.strategy_options import Level
from lockstep.core.summation_tree import Node
from lockstep.reduce.ordered import OrderedBucket, OrderedReducer
from lockstep.reduce.reducer import BucketShape


class Bf16Reducer(OrderedReducer):
    """Sums float32 and float64 gradients after rounding them to bfloat16.

    Buckets of 16-bit numbers, and those that do not hold gradients (running statistics), are summed as they are.
    """

    level = Level.TOLERANCE

    def _make_bucket(self, shape: BucketShape, slots: int) -> OrderedBucket:
        rounds = bool(shape.members) and shape.dtype.itemsize > torch.bfloat16.itemsize
        kind = _RoundedBucket if rounds else OrderedBucket
        return kind(shape, self._ranks, slots, self._device)


class _RoundedBucket(OrderedBucket):
    """A bucket that travels as bfloat16: copying a gradient into its staging memory is what rounds it."""

    def __init__(self, shape: BucketShape, ranks: int, slots: int, device: torch.device) -> None:
        super().__init__(dataclasses.replace(shape, dtype=torch.bfloat16), ranks, slots, device)
        self.total = torch.zeros(shape.numel, dtype=shape.dtype, device=device)

    def renew(self) -> None:
        self.total = torch.zeros_like(self.total)

    def finish(self) -> None:
        super().finish()
        self.total.copy_(self._gathered[: self._numel])

    def _fold(self, nodes: list[Node], parts: Tensor, leaves: int) -> Tensor:
        return super()._fold(nodes, parts.to(self.total.dtype), leaves).to(torch.bfloat16)
