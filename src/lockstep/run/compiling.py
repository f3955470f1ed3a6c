"""Compiles a model block by block, so that the keyed randomness between blocks stays outside of compiled code."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.randomness import find_units


def compile_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Compiles each block in place and returns the units whose randomness is keyed: the blocks and the model.

    A block is an outermost child of a Sequential, ModuleList or ModuleDict that has children itself. A model without
    blocks is compiled whole. Inside a block randomness runs on as one stream.
    """
    units: dict[str, nn.Module] = {}
    for name, module in find_units(model).items():
        inside = any(name.startswith(f"{outer}.") for outer in units)
        if name and not inside and not _is_container(module) and any(True for _ in module.children()):
            units[name] = module
    for block in units.values() or [model]:
        block.forward = torch.compile(block.forward, dynamic=False)  # else its graphs depend on earlier shapes
    return {"": model, **units}


def _is_container(module: nn.Module) -> bool:
    """Whether the blocks are inside of this module rather than the module itself."""
    return any(
        isinstance(inner, nn.Sequential | nn.ModuleList | nn.ModuleDict) for inner in module.children()
    ) or (isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict))
