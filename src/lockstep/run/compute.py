"""Runs the model on one micro-batch: keys, precision, forward pass, loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.launch.beat import MICRO_BATCH, place_in_step
from lockstep.launch.heartbeat import Heartbeat
from lockstep.plan import StepPlan
from lockstep.precision import Precision
from lockstep.randomness import KeyedRandomness
from lockstep.run.delivery import Delivery
from lockstep.run.loss import split_batch, sum_and_weight

_PLACES = {phase: place_in_step(phase) for phase in ("forward", "backward", "reduce", "update")}
_FORWARD, _BACKWARD = _PLACES["forward"], _PLACES["backward"]
Prepare = Callable[[Tensor], Tensor]


class Compute:
    """The forward pass of a prepared model, the same in training and evaluation.

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
        self._precision, self._delivery = precision, Delivery(device)
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
        with self.autocast():
            if forward is not None:
                data = self._to_device(data)
                return forward(data), data
            inputs, named, target = self.inputs(data, finish)
            return model(*inputs, **named), target

    def inputs(self, data: Any, finish: Prepare | None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional and named arguments of the model and the target, on the device, from a micro-batch's data."""
        inputs, named, target = split_batch(self._to_device(data))
        if finish is not None and inputs:
            inputs = (finish(inputs[0]), *inputs[1:])
        return tuple(self._laid_out(value) for value in inputs), named, target

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return self._precision.forward()

    def _laid_out(self, value: Any) -> Any:
        if self._layout is torch.channels_last and isinstance(value, Tensor) and value.dim() == 4:
            return value.to(memory_format=torch.channels_last)
        return value

    def _to_device(self, data: Any) -> Any:
        return self._delivery(data)


@dataclass(frozen=True)
class StepCompute:
    """The forward pass and the loss of one step's micro-batches; see ``lockstep.strategies.Compute``."""

    compute: Compute
    randomness: KeyedRandomness
    heartbeat: Heartbeat
    plan: StepPlan
    function: Callable[..., Any]
    """The loss, of (output, target)."""
    forward: Callable[..., Any] | None
    """The user's own way from a micro-batch's data to the output."""
    short: int
    """What ``Heartbeat.begin_step`` returned."""
    first_key: int
    """Added to the numbers of micro-batches in their keys: a second backward pass of a step draws other numbers."""

    def __call__(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Forward pass and loss of a whole model."""
        self.begin(micro_batch)
        output, target = self.compute.output_and_target(
            micro_batch.data, self.forward, model or self.compute.model, self.compute.finish
        )
        result = self.loss(output, target, micro_batch)
        if self.short:
            self.heartbeat.place[0] = self.short + micro_batch.k * MICRO_BATCH + _BACKWARD
        else:
            self.heartbeat.mark(
                "backward", epoch=self.plan.epoch, step=self.plan.step, micro_batch=micro_batch.k
            )
        return result

    def begin(self, micro_batch: MicroBatch) -> None:
        """Keys what is drawn, and notes where this rank is."""
        if self.short:
            self.heartbeat.place[0] = self.short + micro_batch.k * MICRO_BATCH + _FORWARD
        else:
            note(self.heartbeat, "forward", self.plan.epoch, self.plan.step, micro_batch)
        self.randomness.begin_micro_batch(self.plan.step, micro_batch.k + self.first_key)

    def resume(self, micro_batch: MicroBatch, phase: str) -> None:
        """Keys what is drawn in a micro-batch that goes on, and notes where this rank is."""
        self._come_to(phase, micro_batch)
        self.randomness.resume_micro_batch(self.plan.step, micro_batch.k + self.first_key)

    def exchange(self) -> None:
        """Notes that this rank waits for the others."""
        self._come_to("reduce")

    def end(self) -> None:
        """Notes that the gradient is there."""
        self._come_to("update")

    def _come_to(self, phase: str, micro_batch: MicroBatch | None = None) -> None:
        """Notes where this rank is. What ddp does for each micro-batch stores its place itself: a call costs more."""
        if self.short:
            k = 0 if micro_batch is None else micro_batch.k
            self.heartbeat.place[0] = self.short + k * MICRO_BATCH + _PLACES[phase]
        else:
            note(self.heartbeat, phase, self.plan.epoch, self.plan.step, micro_batch)

    def inputs(self, micro_batch: MicroBatch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The model's arguments and the target."""
        if self.forward is not None:
            raise ConfigError(
                "run.backward was given a forward of your own, which calls the whole model for one micro-batch; here "
                "the model is run in parts, or for several micro-batches at once. Give the model a forward(input), or "
                "use strategy 'ddp' without sync_batch_norm."
            )
        return self.compute.inputs(micro_batch.data, self.compute.finish)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return self.compute.autocast()

    def loss(self, output: Any, target: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum and weight of the user's loss; of a spare, a sum that hangs together with the output."""
        with self.autocast():
            if micro_batch.k >= self.plan.leaves:
                values = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
                total = torch.stack([value.double().sum() for value in values]).sum()
                return total, torch.zeros_like(total)
            self.randomness.begin_loss()
            return sum_and_weight(self.function(output, target), len(micro_batch))


def note(
    heartbeat: Heartbeat, phase: str, epoch: int, step: int, micro_batch: MicroBatch | None = None
) -> None:
    """Writes down what this rank is about to do."""
    if micro_batch is None:
        heartbeat.mark(phase, epoch=epoch, step=step)
    else:
        heartbeat.mark(phase, epoch=epoch, step=step, micro_batch=micro_batch.k)
        heartbeat.samples(micro_batch.indices)
