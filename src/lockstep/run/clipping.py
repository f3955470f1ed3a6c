"""Clips gradients by their total norm, computed in an order that no layout changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.sums import fold_rows


def clip_gradients(parameters: Mapping[str, nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradients so that their total norm is at most ``max_norm``.

    Squares are summed in float64 over each row (index of dim 0), rows are folded in a tree, parameters in name order.
    torch's ``clip_grad_norm_`` sums float32 in an order that depends on how a parameter is stored.

    Returns:
        The norm before, float64, 0-dim.
    """
    gradients = [p.grad for _, p in sorted(parameters.items()) if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    squares = [_sum_of_squares(gradient) for gradient in gradients]
    norm = torch.stack(squares).cumsum(0)[-1].sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def _sum_of_squares(gradient: Tensor) -> Tensor:
    rows = gradient.detach().reshape(gradient.shape[0] if gradient.dim() else 1, -1).double()
    return fold_rows(torch.linalg.vecdot(rows, rows))
