"""Clips gradients by their total norm, computed in an order that no layout changes."""

from __future__ import annotations

from torch import Tensor

from lockstep.strategies import Strategy


def clip_gradients(strategy: Strategy, max_norm: float) -> Tensor:
    """Scales the gradients so that their total norm is at most ``max_norm``. Collective.

    Squares are summed in float64 over each row (index of dim 0), rows are folded in a tree, parameters in name order.
    torch's ``clip_grad_norm_`` sums float32 in an order that depends on how a parameter is stored.

    Returns:
        The norm before, float64, 0-dim.
    """
    norm = strategy.squares().cumsum(0)[-1].sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for gradient in strategy.gradients():
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm
