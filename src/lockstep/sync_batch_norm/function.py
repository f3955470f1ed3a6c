"""Normalisation by statistics of all ranks, and its gradient, which is of all ranks too.

With x' = (x - M) / sqrt(V + e) over the N values of a channel on all ranks, and g the gradient of y = w x' + b:

    gradient of b    sum g                      of this rank's rows: the strategy sums it like any other gradient
    gradient of w    sum g x'                   as well
    gradient of x    w / sqrt(V + e) * (g - A - x' B)        A = sum g / N,  B = sum g x' / N over all ranks

So backward is one exchange of two numbers per channel. The passes over the data are torch's own fused kernels, called
with the statistics as constants, on CPU and CUDA, in any memory format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.sums import fold_rows
from lockstep.sync_batch_norm.rank_rows import RankRows
from lockstep.sync_batch_norm.statistics import statistics_dtype


class NormaliseByAll(torch.autograd.Function):
    """``w (x - mean) / sqrt(variance + eps) + b`` where mean and variance are functions of the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        rows: RankRows,
        counts: bool,
    ) -> Tensor:
        """The normalised x, of its type, shape and memory format.

        Args:
            ctx: torch's.
            x: this rank's values, shape (n, channels, ...); n may be 0.
            weight: w, shape (channels,), or None for ones.
            bias: b, shape (channels,), or None for zeros.
            mean: over all ranks, shape (channels,).
            variance: the biased one over all ranks, shape (channels,).
            count: values per channel over all ranks, 0-dim.
            eps: added to the variance.
            rows: exchanges with the other ranks in backward.
            counts: whether this rank's values are in mean and variance; without, x gets no gradient.
        """
        dtype = statistics_dtype(x)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.rows, ctx.counts, ctx.bias_dtype = (
            eps,
            rows,
            counts,
            None if bias is None else bias.dtype,
        )
        return _normalise(x, _in(weight, dtype), _in(bias, dtype), mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias. Collective: every rank must run its backward pass."""
        x, weight, mean, variance, count = ctx.saved_tensors
        channels, dtype = x.shape[1], statistics_dtype(x)
        sums = torch.zeros(2 * channels, dtype=torch.float64, device=x.device)
        if ctx.counts and x.numel():
            sums[:channels], sums[channels:] = _sums(gradient, x, mean, variance, ctx.eps)
        of_all = (fold_rows(ctx.rows.gather(sums)) / count).to(dtype)
        return (
            _gradient_of_x(ctx, gradient, of_all[:channels], of_all[channels:])
            if ctx.needs_input_grad[0]
            else None,
            sums[channels:].to(weight.dtype) if ctx.needs_input_grad[1] else None,
            sums[:channels].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 6,
        )


def _gradient_of_x(ctx: Any, gradient: Tensor, mean_gradient: Tensor, mean_product: Tensor) -> Tensor:
    x, weight, mean, variance, _ = ctx.saved_tensors
    if not (ctx.counts and x.numel()):
        return torch.zeros_like(x)
    scale = (variance + ctx.eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    wide, wide_gradient = x.to(mean.dtype), gradient.to(mean.dtype)
    of_all = _normalise(wide, -scale * mean_product, -scale * mean_gradient, mean, variance, ctx.eps)
    return of_all.addcmul_(wide_gradient, _per_channel(scale, x)).to(x.dtype)


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    normalised: Tensor = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
    return normalised


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sums of g and of g x' over this rank's rows, each of shape (channels,)."""
    ones = torch.ones_like(mean)
    wide, wide_gradient = x.to(mean.dtype), gradient.to(mean.dtype)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        wide_gradient, wide, ones, mean, variance, None, None, False, eps, [False, True, True]
    )
    return total, product


def _in(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(dtype)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
