"""Runs the model on one micro-batch: keys, precision, forward pass, loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batch import MicroBatch
from lockstep.launch.heartbeat import Heartbeat
from lockstep.precision import Precision
from lockstep.randomness import KeyedRandomness
from lockstep.run.loss import split_batch, sum_and_weight

Prepare = Callable[[Tensor], Tensor]


class Compute:
    """The forward pass of a prepared model.

    Args:
        model: what is called.
        precision: the number format.
        device: where inputs go.
        channels_last: put image batches into channels-last order.
    """

    def __init__(
        self, model: nn.Module, precision: Precision, device: torch.device, channels_last: bool
    ) -> None:
        self.model = model
        self._precision, self._device = precision, device
        self._layout = torch.channels_last if channels_last else torch.preserve_format
        self.finish: Prepare | None = None
        """Applied to the input on the device, such as a normalisation of uint8 images."""

    def output_and_target(
        self, data: Any, forward: Callable[..., Any] | None, model: nn.Module, finish: Prepare | None
    ) -> tuple[Any, Any]:
        """The output of ``model`` on a micro-batch's data, and its target.

        Args:
            data: of one micro-batch.
            forward: gives the output, if ``model(input)`` does not.
            model: what is called.
            finish: applied to the input on the device.
        """
        with self._precision.forward():
            return self._forward(data, forward, model, finish)

    def loss(
        self,
        micro_batch: MicroBatch,
        function: Callable[..., Any],
        forward: Callable[..., Any] | None,
        randomness: KeyedRandomness,
    ) -> tuple[Tensor, Tensor]:
        """Sum and weight of the loss; what is drawn is keyed by what ``randomness`` was set to."""
        with self._precision.forward():
            output, target = self._forward(micro_batch.data, forward, self.model, self.finish)
            randomness.begin_loss()
            return sum_and_weight(function(output, target), len(micro_batch))

    def _forward(
        self, data: Any, forward: Callable[..., Any] | None, model: nn.Module, finish: Prepare | None
    ) -> tuple[Any, Any]:
        data = self._to_device(data)
        if forward is not None:
            return forward(data), data
        inputs, named, target = split_batch(data)
        if finish is not None and inputs:
            inputs = (finish(inputs[0]), *inputs[1:])
        return model(*(self._laid_out(value) for value in inputs), **named), target

    def _laid_out(self, value: Any) -> Any:
        if self._layout is torch.channels_last and isinstance(value, Tensor) and value.dim() == 4:
            return value.to(memory_format=torch.channels_last)
        return value

    def _to_device(self, data: Any) -> Any:
        if self._device.type == "cpu":
            return data
        if isinstance(data, Tensor):
            return data.to(self._device, non_blocking=True)
        if isinstance(data, dict):
            return {name: self._to_device(value) for name, value in data.items()}
        if isinstance(data, tuple | list):
            return type(data)(self._to_device(value) for value in data)
        return data


def note(
    heartbeat: Heartbeat, phase: str, epoch: int, step: int, micro_batch: MicroBatch | None = None
) -> None:
    """Writes down what this rank is about to do."""
    if micro_batch is None:
        heartbeat.mark(phase, epoch=epoch, step=step)
    else:
        heartbeat.mark(phase, epoch=epoch, step=step, micro_batch=micro_batch.k)
        heartbeat.samples(micro_batch.indices.tolist())
