"""BatchNorm modules with statistics over all parts of a batch, made from torch's own by changing their class.

A part is what one forward pass is given: a micro-batch, or a rank's rows. The moments of the parts are combined in the
summation tree (T. F. Chan, G. H. Golub, R. J. LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances, 1979). With n rows, mean m and sum of squared deviations s of each part, per channel:

    N = sum n        M = sum n m / N        S = sum s + sum n (m - M)^2

Nothing here is the small difference of large numbers, as ``E[x^2] - E[x]^2`` is. A part without rows has n = m = s = 0
and changes nothing. The sums over parts are explicit adds in float64, so every rank gets the same bits, and they depend
on the parts alone.

With x' = (x - M) / sqrt(V + e) over the N values of a channel in all parts, and g the gradient of y = w x' + b:

    gradient of b    sum g                      of this part: the strategy sums it like any other gradient
    gradient of w    sum g x'                   as well
    gradient of x    w / sqrt(V + e) * (g - A - x' B)        A = sum g / N,  B = sum g x' / N over all parts

So backward is one exchange of two numbers per channel. The passes over the data are torch's own fused kernels, called
with the statistics as constants, on CPU and CUDA, in any memory format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.core.summation_tree import fold_rows
from lockstep.distributed.process_group import open_group
from lockstep.distributed.rank_exchange import GroupExchange, RankExchange, open_exchange
from lockstep.errors import ConfigError


class Rows(Protocol):
    """Gathers a row of numbers of each part of a batch."""

    def gather(self, row: Tensor, name: str) -> Tensor:
        """The rows of all parts in order, shape (parts, n), from one of shape (n,), float64. Waits for all parts.

        ``name`` is that of the BatchNorm that asks.
        """


class RankRows:
    """Gathers the rows of the ranks of an ``exchange``: a part is a rank's. Without one this process is alone.

    A model's copies share the object: process groups cannot be copied.
    """

    def __init__(self, exchange: RankExchange | None) -> None:
        self._exchange = exchange
        self.ranks = 1 if exchange is None else exchange.ranks
        self.bytes_sent = 0

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device, timeout: float, shared: bool) -> RankRows:
        """An exchange whose order is its own, whatever else goes over ``group``. Collective; see ``open_exchange``."""
        own = open_group(dist.get_process_group_ranks(group), device=device)
        return cls(open_exchange(own, device, timeout, shared))

    def gather(self, row: Tensor, name: str = "") -> Tensor:
        """The rows of all ranks, shape (ranks, n), from one of shape (n,), float64. Collective; waits for all ranks.

        Raises:
            ConfigError: the ranks have already left each other.
        """
        if self.ranks == 1:
            return row.unsqueeze(0)
        if self._exchange is None:
            raise ConfigError(
                "A synchronised BatchNorm was called in training mode after its run was closed, when its process group "
                "no longer exists. Call model.eval() first, or use the model before run.close()."
            )
        self.bytes_sent += row.nbytes * self._exchange.copies
        return self._exchange.all_gather(row)

    def release(self) -> None:
        """Releases the process group, or the memory."""
        if self._exchange is not None:
            self._exchange.release()
        self._exchange = None

    def __deepcopy__(self, memo: dict[int, object]) -> RankRows:
        return self

    def __reduce__(self) -> tuple[type[RankRows], tuple[None]]:
        """Pickled, as in ``torch.save(model)``, it is that of one process alone."""
        return RankRows, (None,)


@dataclass(frozen=True)
class Moments:
    """Statistics of each channel over all parts of a batch."""

    mean: Tensor
    """Shape (channels,), float64."""
    variance: Tensor
    """Mean squared deviation, shape (channels,), float64."""
    count: Tensor
    """Values per channel, 0-dim, float64."""

    @property
    def unbiased(self) -> Tensor:
        """The variance with N - 1 in place of N, as the running variance has it."""
        return self.variance * (self.count / (self.count - 1))


def gather_moments(x: Tensor, gather: Callable[[Tensor], Tensor], counts: bool = True) -> Moments:
    """The moments over the values of all parts. Collective: every rank must call this, with or without values.

    Args:
        x: this part's values, shape (n, channels, ...); n may be 0.
        gather: see ``Rows.gather``.
        counts: whether these values are part of the batch; without, they only join.
    """
    channels = x.shape[1]
    row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if counts and x.numel():
        mean, variance = torch.batch_norm_update_stats(x.to(statistics_dtype(x)), None, None, 0.0)
        count = x.numel() // channels
        row[0].fill_(count)  # an assignment copies the number to the device, which the host waits for
        row[1 : channels + 1] = mean
        row[channels + 1 :] = variance.double() * count
    gathered = gather(row)
    n, means, squares = gathered[:, :1], gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
    count_of_all = fold_rows(n)
    mean_of_all = fold_rows(n * means) / count_of_all
    squares_of_all = fold_rows(squares + n * (means - mean_of_all).square())
    return Moments(mean_of_all, squares_of_all / count_of_all, count_of_all[0])


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The type in which statistics of ``x`` are computed: float64 for float64, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class NormaliseByAll(torch.autograd.Function):
    """``w (x - mean) / sqrt(variance + eps) + b`` where mean and variance are functions of the x of all parts."""

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
        gather: Callable[[Tensor], Tensor],
        counts: bool,
    ) -> Tensor:
        """The normalised x, of its type, memory format and shape (n, channels, ...), where n may be 0.

        Weight and bias have the shape (channels,); mean, biased variance and count are those of ``gather_moments``.
        Without ``counts``, this part's values are not in them, and x gets no gradient.
        """
        dtype = statistics_dtype(x)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.gather, ctx.counts = eps, gather, counts
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
        return _normalise(x, weight, bias, mean, variance, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias. Collective: every rank must run its backward pass."""
        saved = ctx.saved_tensors  # once: activation checkpointing gives them no second time
        x, weight, mean, variance, count = saved
        channels, dtype = x.shape[1], statistics_dtype(x)
        sums = torch.zeros(2 * channels, dtype=torch.float64, device=x.device)
        if ctx.counts and x.numel():
            _, sums[channels:], sums[:channels] = torch.ops.aten.native_batch_norm_backward(
                *(gradient.to(dtype), x.to(dtype), torch.ones_like(mean), mean, variance),
                *(None, None, False, ctx.eps, [False, True, True]),
            )
        of_all = (fold_rows(ctx.gather(sums)) / count).to(dtype)
        needs_x = ctx.needs_input_grad[0]
        return (
            _gradient_of_x(ctx, saved, gradient, of_all[:channels], of_all[channels:]) if needs_x else None,
            sums[channels:].to(weight.dtype) if ctx.needs_input_grad[1] else None,
            sums[:channels].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 6,
        )


def _gradient_of_x(
    ctx: Any, saved: Sequence[Tensor], gradient: Tensor, mean_gradient: Tensor, mean_product: Tensor
) -> Tensor:
    x, weight, mean, variance, _ = saved
    if not (ctx.counts and x.numel()):
        return torch.zeros_like(x)
    scale = (variance + ctx.eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    wide, wide_gradient = x.to(mean.dtype), gradient.to(mean.dtype)
    of_all = _normalise(wide, -scale * mean_product, -scale * mean_gradient, mean, variance, ctx.eps)
    return of_all.addcmul_(wide_gradient, scale.view(-1, *[1] * (x.dim() - 2))).to(x.dtype)


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    normalised: Tensor = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
    return normalised


class SyncBatchNorm(_BatchNorm):
    """The base of the three modules below. Made by ``convert_sync_batch_norm``.

    In training mode, statistics are those of all parts of the batch, and every rank must call the module, also one
    without rows. In evaluation mode it is torch's BatchNorm. Parameters, buffers, their names in a ``state_dict``,
    hooks and options are those of the module it was made from.
    """

    rows: Rows
    """Exchanges with the other parts."""
    name_in_model: str = ""
    counts: bool = True
    """True if the rows that this rank gives belong to the batch; without, it joins the others and is normalised as
    they are, but changes no statistics and no gradient."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Normalises ``input``, shape (n, channels, ...). Collective in training mode; waits for all parts.

        Raises:
            ConfigError: all parts together have one value per channel, which has no variance (told on a CPU only: on
                CUDA, asking would hold up the device, and the running variance is infinite).
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's
        gather = partial(self.rows.gather, name=self.name_in_model)
        with torch.no_grad():
            moments = gather_moments(input, gather, self.counts)
            if input.device.type == "cpu" and moments.count < 2:
                raise ConfigError(
                    f"A synchronised BatchNorm got {int(moments.count)} value(s) per channel over the whole batch, but "
                    "training mode needs at least two. Use a larger batch, or drop_last=True."
                )
            self._track(moments.mean, moments.unbiased)
        output: Tensor = NormaliseByAll.apply(  # type: ignore[no-untyped-call]  # torch's stub
            *(input, self.weight, self.bias, moments.mean, moments.variance, moments.count),
            *(self.eps, gather, self.counts),
        )
        return output

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics towards these; as torch does, by 1 / (number of batches) without a momentum."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if factor is not None:
                running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over all parts of a batch."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over all parts of a batch."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over all parts of a batch."""


_SYNCHRONISED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def convert_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Lets every BatchNorm of a model compute its statistics over all ranks, and returns the model. Collective.

    The modules stay the objects they are, so parameters, optimizers, hooks and references to them stay valid.

    Args:
        model: changed in place.
        group: the ranks. Use one that nothing else uses in an order of its own, such as gradients that are summed while
            backward runs. None: all ranks, or this process alone if there is no default group.

    Raises:
        ConfigError: the model has no BatchNorm, or one whose forward pass is not torch's.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    synchronise(model, RankRows(None if group is None else GroupExchange(group)))
    return model


def synchronise(model: nn.Module, rows: Rows) -> dict[str, SyncBatchNorm]:
    """Converts every BatchNorm of a model, as ``convert_sync_batch_norm`` does; returns them by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        raise ConfigError(
            "sync_batch_norm=True needs a model with BatchNorm1d, 2d or 3d, and this model has none. Remove "
            "sync_batch_norm."
        )
    for name, module in found.items():
        if type(module) not in _SYNCHRONISED and not isinstance(module, SyncBatchNorm):
            raise ConfigError(
                f"sync_batch_norm cannot convert {name or 'the model'!r}, a {type(module).__name__}, whose forward "
                "pass is not that of nn.BatchNorm1d, 2d or 3d. Build the model with those."
            )
    for name, module in found.items():
        module.__class__ = _SYNCHRONISED.get(type(module), type(module))
        module.rows = rows  # type: ignore[assignment]  # torch takes every attribute for a tensor or module
        module.name_in_model = name
    return {name: module for name, module in found.items() if isinstance(module, SyncBatchNorm)}
