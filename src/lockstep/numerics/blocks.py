"""The blocks of a model: what ``fsdp`` gathers, and torch.compile compiles, one after the other.

A block is an outermost child of a Sequential, ModuleList or ModuleDict:

    decoder    embedding    blocks.0    blocks.1    ...    head
                            \\_____________________/
                                     blocks

A compiled module is one block with all that is inside of it.
"""

from __future__ import annotations

from torch import nn

from lockstep.numerics.compilation import CompiledForward, is_compiled

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order; none where the model is compiled as one."""
    return {} if is_compiled(model) else dict(_inside("", model))


def _inside(prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(module) in CONTAINERS and type(child) not in CONTAINERS:
            found.append((path, child))
        elif not is_compiled(child):
            found += _inside(path, child)
    return found


def compile_blocks(model: nn.Module) -> None:
    """Compiles each block that has children, in place; a model without such blocks as one."""
    blocks = dict.fromkeys(each for each in blocks_of(model).values() if any(True for _ in each.children()))
    for module in blocks or {model: None}:
        if not is_compiled(module):
            module.forward = CompiledForward(module.forward, modules=len(blocks) or 1)
