"""Compiles a model block by block, so that the keyed randomness between blocks stays outside of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError
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
        block.forward = _compiled(block.forward)
    return {"": model, **units}


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One graph per shape, always the same; torch's dynamic graphs depend on which shapes a rank has seen before.

    For the same reason a shape beyond torch's limit is an error, where torch would go on without compiling it.
    """
    static = torch.compile(forward, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                return static(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ConfigError(
                "compile=True keeps one compiled graph for each shape of input, and more came than torch keeps "
                f"({torch._dynamo.config.recompile_limit}). Pad the samples to a few fixed lengths, or do not compile."
            ) from error

    return call


def _is_container(module: nn.Module) -> bool:
    """Whether the blocks are inside of this module rather than the module itself."""
    return any(
        isinstance(inner, nn.Sequential | nn.ModuleList | nn.ModuleDict) for inner in module.children()
    ) or (isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict))
