"""Holds a user's plan against the whole model: both run the first micro-batch, with the same random numbers.

A plan that splits an activation which some module needs whole (a softmax over features, a dropout that was not named)
would train another model without a word. Plans that were found need no proof: they are tested.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.buffers import RunningBuffers
from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.strategies.contract import Compute
from lockstep.strategies.tensor.exchange import Exchange

_CLOSE, _CLOSE_IN_HALF = 1e-3, 0.05


class PlanProof:
    """Compares the split model with the whole one, once.

    Args:
        whole: a copy from before the split, on the device.
        exchange: the ranks that share the layers.
    """

    def __init__(self, whole: nn.Module, exchange: Exchange) -> None:
        self._whole, self._exchange = whole, exchange

    @torch.no_grad()
    def check(
        self, split: nn.Module, buffers: RunningBuffers, micro_batch: MicroBatch, compute: Compute
    ) -> None:
        """Runs both on one micro-batch; leaves buffers as they were. Collective.

        Raises:
            ConfigError: their outputs differ by more than rounding, or the split model does not run.
        """
        inputs, named, _ = compute.inputs(micro_batch)
        self._whole.train(split.training)
        with compute.autocast():
            half = torch.is_autocast_enabled(self._device(inputs))
            compute.begin(micro_batch)
            expected = _numbers(self._whole(*inputs, **named))
            compute.begin(micro_batch)
            buffers.begin_step()
            try:
                found = _numbers(split(*inputs, **named))
            except (RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ConfigError(
                    f"The whole model runs, and split by tensor.plan it does not: {error}. {_ADVICE}"
                ) from error
            buffers.begin_micro_batch()
        self._require_equal(expected, found, _CLOSE_IN_HALF if half else _CLOSE)

    def _require_equal(self, expected: list[Tensor], found: list[Tensor], close: float) -> None:
        errors = [_difference(one, other) for one, other in zip(expected, found)]
        worst = torch.tensor([max(errors, default=0.0)], dtype=torch.float64, device=found[0].device)
        largest = float(self._exchange.gather(worst).max())
        if largest > close:
            raise ConfigError(
                f"Split by tensor.plan, the model gives another output than whole (relative difference {largest:.2g}). "
                f"{_ADVICE}"
            )

    @staticmethod
    def _device(inputs: tuple[object, ...]) -> str:
        tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
        return tensors[0].device.type if tensors else "cpu"


_ADVICE = (
    "Between 'column' and 'row' every BatchNorm and dropout must be in the plan too ('channels' or 'features'), and "
    "nothing else may need all features. Name those modules, or leave these layers whole."
)


def _numbers(output: object) -> list[Tensor]:
    """The tensors of an output, in float64."""
    return [value.double() for value in tree_leaves(output) if isinstance(value, Tensor)]


def _difference(expected: Tensor, found: Tensor) -> float:
    """Relative to the norm of what is expected; a number above every bound where shapes differ."""
    if expected.shape != found.shape:
        return float("inf")
    both = expected.isfinite() & found.isfinite()
    gap = torch.where(both, expected - found, 0.0).norm()
    return float(gap / torch.where(both, expected, 0.0).norm().clamp(min=1e-12))
