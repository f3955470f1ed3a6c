"""Compiles a model block by block, so that the keyed randomness between blocks stays outside of compiled code."""

from __future__ import annotations

import copy
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
        block.forward = _Compiled(block.forward)
    return {"": model, **units}


class _Compiled:
    """One graph per shape, always the same; torch's dynamic graphs depend on which shapes a rank has seen before.

    For the same reason a shape beyond torch's limit is an error, where torch would go on without compiling it. A copy
    of the module, as a replica of strategy dp is one, gets a compiled forward of its own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._static = torch.compile(forward, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                return self._static(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ConfigError(
                "compile=True keeps one compiled graph for each shape of input, and more came than torch keeps "
                f"({torch._dynamo.config.recompile_limit}). Pad the samples to a few fixed lengths, or do not compile."
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return _Compiled(copy.deepcopy(self._forward, memo))


def _is_container(module: nn.Module) -> bool:
    """Whether the blocks are inside of this module rather than the module itself."""
    return any(
        isinstance(inner, nn.Sequential | nn.ModuleList | nn.ModuleDict) for inner in module.children()
    ) or (isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict))
