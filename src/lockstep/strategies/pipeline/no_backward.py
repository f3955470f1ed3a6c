"""Outputs of a pipelined model that say, where the user calls ``backward`` on them, what to call in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lockstep.errors import ConfigError


def refusing_backward(output: Any) -> Any:
    """The same values; a backward pass through any of its tensors raises ``ConfigError``."""
    if not torch.is_grad_enabled():
        return output
    anchor = torch.empty(0, requires_grad=True)

    def attach(tensor: Tensor) -> Any:
        return _Refusing.apply(tensor, anchor)  # type: ignore[no-untyped-call]  # torch's stub

    return tree_map_only(Tensor, attach, output)


class _Refusing(torch.autograd.Function):
    """Stands where the graph of the whole model would be."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError(
            "backward() was called on the output of a model whose stages lie in several processes, so its graph is in "
            "none of them. Call run.backward(batch, loss_fn), which runs forward and backward through all stages."
        )
