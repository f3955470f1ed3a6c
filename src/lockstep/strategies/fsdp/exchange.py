"""The collectives of FSDP2: which modules are gathered together, and a reduce-scatter in the tree's order.

    round j      rank 0 has micro-batch 2j      rank 1 has 2j+1               (2 ranks)
    all_to_all   rank 0 gets its rows of the gradients of 2j and 2j+1, rank 1 its own of both
    stack        each pushes them in order of k on a binary counter, one for each group of parameters

Every rank holds the leaves of its own rows one by one, so their sum has the tree's order for any number of ranks. FSDP2
itself receives a reduced gradient of zeros; the sums are set after the step's last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lockstep.config.strategy_options import FsdpOptions
from lockstep.core.summation_tree import merges_after_leaf
from lockstep.distributed.collectives import all_gather_flat
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import has_batch_norm

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SMALLEST = 1024
"""Parameters below which gathering a module alone costs more than it saves; it is gathered with the rest."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order: the children of its containers that hold enough parameters.

    A module that shares a parameter with another place is left to the rest, which is gathered with the whole model.
    """
    blocks = {name: module for name, module in _candidates("", model) if _size(module) >= _SMALLEST}
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(parameter, set()).add(owner)
    shared = {owner for names in owners.values() if len(names) > 1 for owner in names}
    return {name: module for name, module in blocks.items() if name not in shared}


def shard(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, options: FsdpOptions
) -> dict[str, FSDPModule]:
    """Makes FSDP2 share the blocks of a model out, and what is left with the whole of it. Collective.

    Returns:
        The modules that gather parameters, by name, the whole model last.

    Raises:
        ConfigError: torch's mixed precision cannot compute this model.
    """
    if options.mixed_precision and has_batch_norm(model):
        raise ConfigError(
            f"fsdp.mixed_precision={options.mixed_precision!r} casts BatchNorm's weights and not its statistics, which "
            f"torch cannot compute with. Use precision={options.mixed_precision!r} instead, which is level A."
        )
    mesh = DeviceMesh.from_group(group, device.type)
    dtype = _TYPES.get(options.mixed_precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    return {
        name: fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward and bool(name),
            mp_policy=policy,
            offload_policy=offload,
        )
        for name, module in [*find_blocks(model).items(), ("", model)]
    }


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _candidates(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child) in _CONTAINERS or type(module) not in _CONTAINERS:
            found += _candidates(path, child)
        else:
            found.append((path, child))
    return found


class CountedAllGather:
    """The all-gather that FSDP2 calls for parameters: its own, with a count of bytes."""

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
    """The reduce-scatter that FSDP2 calls for one group of parameters."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        self._stack: list[Tensor] = []
        self._merges: Iterator[int] = iter(())
        self.output: Tensor | None = None
        """The last output, until it has been looked at; the gradients of FSDP2's parameters are views of it."""
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
        self._stack, self._merges = [], iter(merges_after_leaf(0, leaves, leaves))

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
        for leaf, merges in zip(
            received.view(self._ranks, -1), self._merges
        ):  # what comes after is of spares
            self._stack.append(leaf)
            for _ in range(merges):
                right = self._stack.pop()
                self._stack[-1].add_(right)
        # What stays must not keep the other ranks' leaves alive.
        memory = received.untyped_storage().data_ptr()
        own = [node.untyped_storage().data_ptr() == memory for node in self._stack]
        self._stack = [node.clone() if part else node for node, part in zip(self._stack, own)]
        self.output = output_tensor.zero_()
