"""The results of ``Accelerator.prepare``: DataLoaders, optimizers, schedulers that follow a step's micro-batches."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.run.own_passes import OwnPasses
from lockstep.run.step import DeviceTransfer

if TYPE_CHECKING:
    from lockstep.integrations.accelerate import Accelerator

logger = logging.getLogger(__name__)
_SEVERAL = (
    "The loop's body runs once for each micro-batch of this process, %d for each optimizer step, and a few times more "
    "in the first two steps. Its loss is that of one of these; accelerator.step_loss is the mean loss of the last step."
)
_ACCUMULATION = (
    "To accumulate gradients, give the Accelerator a larger global_batch and more micro_batches, and do not divide the "
    "loss."
)


class Batches:
    """A prepared DataLoader: micro-batches of this process in training, all batches in evaluation.

    ``len()`` is the number of optimizer steps of an epoch, equal on every number of processes; that of the DataLoader's
    batches in an evaluation and after one.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator) -> None:
        self.loader, self._accelerator = loader, accelerator
        self._is_evaluated: bool | None = None
        """True if the last loop over it was an evaluation; None before the first."""

    def _evaluates(self) -> bool:
        self._accelerator.run.require_prepared()
        return not (self._accelerator.model.training and torch.is_grad_enabled())

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        self._is_evaluated = self._evaluates()
        if self._is_evaluated:
            around, accelerator.passes = accelerator.passes, None  # a loop of training may evaluate
            try:
                yield from self._evaluation(accelerator)
            finally:
                accelerator.passes, accelerator.rows_of_last_batch = around, None
            return
        is_whole = False
        try:
            yield from self._training(accelerator.run)
            is_whole = True
        finally:
            if not is_whole and not sys.is_finalizing():
                self._leave()
            accelerator.passes = None

    def _evaluation(self, accelerator: Accelerator) -> Iterator[Any]:
        to_device, loader = DeviceTransfer(accelerator.run.device), self.loader
        counted = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
        rows = 0
        if loader.batch_size and not loader.drop_last and isinstance(counted, Sized):
            rows = len(counted) % loader.batch_size
        for number, batch in enumerate(loader, 1):
            accelerator.rows_of_last_batch = rows if rows and number == len(loader) else None
            yield to_device(batch)

    def _training(self, run: Run) -> Iterator[Any]:
        accelerator, to_device, micro_batch = self._accelerator, DeviceTransfer(run.device), None
        steps, epoch = run.batches(self.loader), run.position.epoch
        if not len(steps) and not any(steps) and run.position.epoch > epoch:
            steps = run.batches(self.loader)  # it was saved within an epoch's last step, and that is over now
        try:
            for batch in steps:
                if accelerator.step_loss is None and run.options.micro_batches > 1 and run.is_main:
                    logger.warning(_SEVERAL, len(batch.micro_batches))
                accelerator.passes = OwnPasses(run, batch, micro_batch)
                passes = 0
                for micro_batch in accelerator.passes:
                    passes += 1
                    yield to_device(micro_batch.data)
                for each in accelerator.stepped:
                    each.end_step(passes)
        finally:
            steps.close()

    def _leave(self) -> None:
        """Notes that a loop of training ended before its data did: nobody would see an exception from here."""
        accelerator = self._accelerator
        accelerator.left_early = left_early(accelerator)
        if accelerator.left_early:
            return
        for each in accelerator.stepped:  # after a whole step, and the script can tell where these are
            each.leave_step()
        accelerator.run._loop.end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the run knows the epoch."""

    def __len__(self) -> int:
        is_evaluated = self._is_evaluated
        if is_evaluated is None:  # models of transformers are in evaluation mode before they are trained
            is_evaluated = self._evaluates() and self._accelerator.step_loss is not None
        return len(self.loader) if is_evaluated else self._accelerator.run.steps_per_epoch(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def left_early(accelerator: Accelerator) -> str:
    """Why a loop of training that has not read all of its data should not end here; empty where it may."""
    if accelerator.is_last and accelerator.asked_whether_last and accelerator.step_loss is not None:
        return ""
    return "The loop over a prepared DataLoader was left before its end, by break or next(), and " + (
        "not by a count of optimizer steps. Its body runs once for each micro-batch, so each number of processes would "
        "end elsewhere. Count steps under 'if accelerator.sync_gradients:'."
        if accelerator.is_last
        else "in the middle of an optimizer step, whose gradients are lost. Leave it under 'if "
        "accelerator.sync_gradients:', after optimizer.step(); to look at a batch, use the DataLoader that "
        "accelerator.prepare was given."
    )


class AtLast:
    """An optimizer or a scheduler, which steps with the last micro-batch of a step."""

    def __init__(self, wrapped: Any, accelerator: Accelerator) -> None:
        self._wrapped, self._accelerator = wrapped, accelerator
        self.is_optimizer = isinstance(wrapped, PreparedOptimizer)
        self._steps, self._early_steps, self._is_cleared = 0, 0, False

    def step(self, *given: Any, **named: Any) -> Any:
        """Steps what is wrapped, in the last micro-batch, or at once outside of the loop of training."""
        if self._accelerator.passes is None:
            return self._wrapped.step(*given, **named)
        self._steps += 1
        if self._accelerator.is_last:
            return self._wrapped.step(*given, **named)
        self._early_steps += 1
        return None

    def zero_grad(self, *given: Any, **named: Any) -> None:
        """Clears the gradients: in the loop of training, at the end of the step."""
        self._is_cleared = True
        if self._accelerator.passes is None:
            self._wrapped.zero_grad(*given, **named)

    def end_step(self, passes: int) -> None:
        """Clears the gradients of an optimizer after ``passes`` passes through the loop's body.

        Raises:
            ConfigError: the loop did not step and clear it in every pass, so gradients of several steps were to be
                added, or some pass was to count more than others.
        """
        steps = self._steps
        at_last_only = self._accelerator.asked_whether_last and not self._early_steps
        name = type(self._wrapped.wrapped if self.is_optimizer else self._wrapped).__name__
        missing = [call for call, done in (("step", steps), ("zero_grad", self._is_cleared)) if not done]
        if self.is_optimizer and missing:
            raise ConfigError(
                f"The loop's body did not call {' and '.join(missing)}() of {name}. Both belong to each step. "
                f"{_ACCUMULATION}"
            )
        if steps not in (0, passes) and not at_last_only:
            raise ConfigError(
                f"The loop's body called step() of {name} in {steps} of {passes} passes, by a count of its own. Call "
                f"it in every pass: it steps with the last micro-batch of each step. {_ACCUMULATION}"
            )
        self._steps, self._early_steps, self._is_cleared = 0, 0, False
        if self.is_optimizer:
            self.clear()

    @property
    def has_stepped(self) -> bool:
        """True for an optimizer that was stepped in this pass, the last of a step."""
        return self.is_optimizer and self._steps > self._early_steps

    def leave_step(self) -> None:
        """As ``end_step``, where the loop was left in the last pass."""
        if self.has_stepped or (self.is_optimizer and self._is_cleared):
            self.clear()
        self._steps, self._early_steps, self._is_cleared = 0, 0, False

    def clear(self) -> None:
        """Clears the gradients of an optimizer now."""
        self._wrapped.zero_grad()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
