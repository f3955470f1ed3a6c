"""The reduce-scatter of FSDP2 in the tree's order.

    round j      rank 0 has micro-batch 2j      rank 1 has 2j+1               (2 ranks)
    all_to_all   rank 0 gets its rows of the gradients of 2j and 2j+1, rank 1 its own of both
    stack        each pushes them in order of k on a binary counter, one for each group of parameters

Every rank holds the leaves of its own rows one by one, so their sum has the tree's order for any number of ranks. What
FSDP2 then takes for the reduced gradient is zero; the sums are set when the step's micro-batches are done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.collectives import all_gather_flat
from lockstep.tree import merges_after_leaf


class CountedAllGather:
    """What FSDP2 calls to gather parameters, which is its own all-gather and a count of bytes."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def install(self, module: FSDPModule) -> None:
        """Makes a module use it."""
        module.set_custom_all_gather(self)  # type: ignore[arg-type]  # not derived from torch's own class

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers the rows of one unit. Collective."""
        self.bytes_sent += input_tensor.nbytes * (dist.get_world_size(group) - 1)
        return all_gather_flat(output_tensor, input_tensor, group, async_op=async_op)


class OrderedReduceScatter:
    """What FSDP2 calls for one group of parameters, in place of its own reduce-scatter.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        self._stack: list[Tensor] = []
        self._merges: tuple[int, ...] = ()
        self._next = 0
        self.output: Tensor | None = None
        """What FSDP2 was last given, while somebody looks at it; its parameters' gradients are views of it."""
        self.bytes_sent = 0

    def install(self, module: FSDPModule) -> None:
        """Makes a module use it, and neither divide nor leave out unused parameters."""
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # not derived from torch's own class
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
            module.set_reduce_scatter_unused_params(True)

    def begin(self, leaves: int) -> None:
        """Starts a step of ``leaves`` micro-batches."""
        self._stack, self._next = [], 0
        self._merges = merges_after_leaf(0, leaves, leaves)

    def take(self) -> Tensor | None:
        """The sum over the step's micro-batches, flat as ``output`` is; None if no backward pass came here."""
        return self._stack.pop() if self._stack else None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchanges one micro-batch of every rank. Collective, in the same order on every rank."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=self._group)
        self.bytes_sent += input_tensor.nbytes * (self._ranks - 1) // self._ranks
        for leaf in received.view(self._ranks, -1):
            if self._next < len(self._merges):  # what comes after is of spares
                self._push(leaf)
        # What stays must not keep the other ranks' leaves alive.
        self._stack = [node.clone() if _is_part_of(node, received) else node for node in self._stack]
        self.output = output_tensor.zero_()

    def _push(self, leaf: Tensor) -> None:
        self._stack.append(leaf)
        for _ in range(self._merges[self._next]):
            right = self._stack.pop()
            self._stack[-1].add_(right)
        self._next += 1


def _is_part_of(tensor: Tensor, whole: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
