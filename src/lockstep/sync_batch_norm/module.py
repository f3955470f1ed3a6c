"""BatchNorm modules that compute their statistics over all ranks, made from torch's own by changing their class."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.sync_batch_norm.function import NormaliseByAll
from lockstep.sync_batch_norm.rank_rows import RankRows
from lockstep.sync_batch_norm.statistics import gather_moments


class SyncBatchNorm(_BatchNorm):
    """What the three modules below have in common. Made by ``convert_sync_batch_norm``.

    In training mode, statistics are those of the rows of all ranks and every rank must call the module, also one
    without rows. In evaluation mode it is torch's BatchNorm. Parameters, buffers, their names in a ``state_dict``,
    hooks and options are those of the module it was made from.
    """

    rows: RankRows
    """Exchanges with the other ranks."""
    counts: bool = True
    """Whether the rows that this rank gives belong to the batch; without, it joins the others and is normalised as
    they are, but changes no statistics and no gradient."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Normalises ``input``, shape (n, channels, ...). Collective in training mode; waits for all ranks.

        Raises:
            ConfigError: all ranks together have one value per channel, which has no variance (told on a CPU only: on
                CUDA, asking would hold up the device, and the running variance is infinite).
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's
        with torch.no_grad():
            moments = gather_moments(input, self.rows, self.counts)
            if input.device.type == "cpu" and moments.count < 2:
                raise ConfigError(
                    f"A synchronised BatchNorm was given {int(moments.count)} value(s) per channel over all ranks, "
                    "and needs at least two in training mode. Use a larger batch, or drop_last=True."
                )
            self._track(moments.mean, moments.unbiased)
        output: Tensor = NormaliseByAll.apply(  # type: ignore[no-untyped-call]  # torch's stub
            input,
            self.weight,
            self.bias,
            moments.mean,
            moments.variance,
            moments.count,
            self.eps,
            self.rows,
            self.counts,
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
    """``nn.BatchNorm1d`` over all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over all ranks."""


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
    synchronise(model, RankRows(group))
    return model


def synchronise(model: nn.Module, rows: RankRows) -> list[SyncBatchNorm]:
    """Converts every BatchNorm of a model, as ``convert_sync_batch_norm`` does, and returns them. Collective.

    Args:
        model: changed in place.
        rows: exchanges with the other ranks.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        raise ConfigError(
            "sync_batch_norm was asked for, and the model has no BatchNorm1d, 2d or 3d. Leave sync_batch_norm out: "
            "without BatchNorm the rows of a batch do not depend on each other."
        )
    for name, module in found.items():
        if type(module) not in _SYNCHRONISED and not isinstance(module, SyncBatchNorm):
            raise ConfigError(
                f"sync_batch_norm cannot convert {name or 'the model'!r}, a {type(module).__name__}, whose forward "
                "pass is not that of nn.BatchNorm1d, 2d or 3d. Build the model with those."
            )
    rows.make_room(max(2 * module.num_features + 1 for module in found.values()))
    for module in found.values():
        module.__class__ = _SYNCHRONISED.get(type(module), type(module))
        module.rows = rows  # type: ignore[assignment]  # torch takes every attribute for a tensor or module
    return [module for module in found.values() if isinstance(module, SyncBatchNorm)]
