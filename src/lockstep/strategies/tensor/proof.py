"""Holds a user's plan against the whole model: both run the first step's micro-batches, with the same random numbers.

A plan that splits an activation which some module needs whole (a softmax over features, a dropout that was not named)
would train another model without a word. Plans that were found need no proof: they are tested.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self,
        split: nn.Module,
        buffers: RunningBuffers,
        micro_batches: Sequence[MicroBatch],
        compute: Compute,
    ) -> None:
        """Runs both on a few micro-batches; leaves buffers as they were. Collective.

        All of a step are better than one: with few samples, a dropout that each rank draws for itself may by chance
        drop what is zero anyway.

        Raises:
            ConfigError: their outputs differ by more than rounding, or the split model does not run.
        """
        self._whole.train(split.training)
        differences, close = [0.0], _CLOSE
        for micro_batch in micro_batches:
            inputs, named, _ = compute.inputs(micro_batch)
            with compute.autocast():
                if torch.is_autocast_enabled(self._device(inputs)):
                    close = _CLOSE_IN_HALF
                compute.begin(micro_batch)
                expected = _numbers(self._whole(*inputs, **named))
                compute.begin(micro_batch)
                buffers.begin_step()
                found = self._run_split(split, inputs, named)
                buffers.begin_micro_batch()
            differences += map(_difference, expected, found)
        self._require_close(max(differences), close, expected[0].device)

    def _run_split(
        self, split: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> list[Tensor]:
        try:
            return _numbers(split(*inputs, **named))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"The whole model runs, and split by tensor.plan it does not: {error}. {_ADVICE}"
            ) from error

    def _require_close(self, worst: float, close: float, device: torch.device) -> None:
        rows = self._exchange.gather(torch.tensor([worst], dtype=torch.float64, device=device))
        largest = float(rows.max())
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
