"""Which modules of a model are gathered and freed as one, and torch told so."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lockstep.buffers import has_batch_norm
from lockstep.errors import ConfigError
from lockstep.strategy_options import FsdpOptions

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
