"""An ``Accelerator`` for scripts written for Hugging Face Accelerate, whose result does not depend on the processes.

    from lockstep.integrations.accelerate import Accelerator   # instead of: from accelerate import Accelerator
    accelerator = Accelerator(global_batch=64)                 # the DataLoader's batch size, for all devices together

The rest of the script stays: ``prepare``, the loop, ``accelerator.backward(loss)``, ``optimizer.step()``. The body of
the training loop runs once for each micro-batch of this process. Optimizers and schedulers step with the last one, as
under Accelerate's ``accumulate``, and gradients are cleared before each step. So a loss that the loop prints is that of
a micro-batch. Evaluations (loops over a prepared DataLoader after ``model.eval()``, or without gradients) run in full
on every process.

What the body of the loop keeps from one micro-batch to the next is not looked for: a body that carries a hidden state
over, or counts calls, gives other bits on other numbers of processes. ``run.backward(batch, loss)`` does look.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.errors import ConfigError
from lockstep.run import Run, init
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.run.own_passes import OwnPasses
from lockstep.run.step import DeviceTransfer

_PRECISIONS = {None: "fp32", "no": "fp32", "bf16": "bf16", "fp16": "fp16"}


class Accelerator:
    """Stands in for ``accelerate.Accelerator``. Every process must make the same calls.

    Args:
        global_batch: samples per optimizer step, over all devices together, as for ``lockstep.init``.
        mixed_precision: ``no``, ``bf16`` or ``fp16``.
        cpu: taken and ignored; ``lockstep run --devices`` says where to train.
        options: further ones of ``lockstep.init``, such as ``micro_batches`` and ``seed``.

    Raises:
        ConfigError: an option that Lockstep does not have.
    """

    def __init__(
        self, *, global_batch: int, mixed_precision: str | None = None, cpu: bool = False, **options: Any
    ) -> None:
        if mixed_precision not in _PRECISIONS:
            raise ConfigError(f"mixed_precision={mixed_precision!r} is not known: no, bf16 or fp16.")
        if "gradient_accumulation_steps" in options:
            raise ConfigError(
                "Leave gradient_accumulation_steps out: global_batch is what one optimizer step sees, and "
                "micro_batches in how many parts it is computed."
            )
        self.run: Run = init(global_batch=global_batch, precision=_PRECISIONS[mixed_precision], **options)
        """The run; what this class does not have, it has."""
        self.mixed_precision = mixed_precision or "no"
        self.device = self.run.device
        self.process_index, self.num_processes = self.run.world.rank, self.run.world.world_size
        self.is_main_process = self.is_local_main_process = self.run.is_main
        self.print = self.run.print
        self.passes: OwnPasses | None = None
        """Of the current step of training."""
        self.model: nn.Module
        self.stepped: list[_AtLast] = []

    @property
    def distributed_type(self) -> Any:
        """Accelerate's word for this process's world."""
        from accelerate import DistributedType

        return DistributedType.NO if self.num_processes == 1 else DistributedType.MULTI_GPU

    @property
    def sync_gradients(self) -> bool:
        """True where the optimizer will be stepped: in the last micro-batch of a step."""
        return self.passes is None or self.passes.is_last

    def prepare(self, *objects: Any) -> Any:
        """Prepares one model, optimizers, schedulers and DataLoaders, and returns them in their order. Collective."""
        models = [each for each in objects if isinstance(each, nn.Module)]
        if len(models) != 1:
            raise ConfigError(
                f"accelerator.prepare takes one model, all optimizers, schedulers and DataLoaders in one call; this "
                f"one has {len(models)} models. Put several into one nn.ModuleDict."
            )
        others = [each for each in objects if not isinstance(each, nn.Module | DataLoader)]
        prepared = self.run.prepare(*models, *others)
        self.model, *rest = prepared if others else (prepared,)
        self.stepped = [_AtLast(each, self) for each in rest]
        placed = {id(given): each for given, each in zip([*models, *others], [self.model, *self.stepped])}
        ready = tuple(
            Batches(each, self) if isinstance(each, DataLoader) else placed[id(each)] for each in objects
        )
        return ready if len(ready) > 1 else ready[0]

    def backward(self, loss: Any) -> None:
        """Runs the backward pass of this micro-batch; with the last one, gradients are summed. Collective.

        Args:
            loss: the mean over the micro-batch's samples (0-dim), one value for each, or the pair (sum, weight).
        """
        if self.passes is None:
            raise ConfigError("accelerator.backward(loss) belongs into a loop over a prepared DataLoader.")
        self.passes.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clips all gradients of the run, once they are summed; None before. Collective."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ has the 2-norm only, not norm_type={norm_type}.")
        return self.run.clip_gradients(max_norm) if self.sync_gradients else None

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """The same values: every process evaluates all samples."""
        if self.passes is not None and self.model.training:
            raise ConfigError(
                "gather_for_metrics in a loop of training would need the other processes' micro-batches. Use "
                "run.backward(batch, loss, also={...}), or evaluate after model.eval()."
            )
        return values

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The model."""
        return model

    def wait_for_everyone(self) -> None:
        """Waits until all processes have come here, and compares their parameters. Collective."""
        self.run.fingerprint()

    def save(self, value: Any, path: Any) -> None:
        """Saves with ``torch.save`` on the main process."""
        if self.is_main_process:
            torch.save(value, path)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Does nothing: what steps does so with the last micro-batch."""
        return nullcontext()

    autocast = no_sync = main_process_first = local_main_process_first = accumulate

    def end_training(self) -> None:
        """Does nothing: the run ends with the program."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"lockstep.integrations.accelerate.Accelerator has no {name!r}. accelerator.run, a lockstep.Run, has "
            "what docs/moving.md names: save and resume, evaluate, predict, callbacks."
        )


class Batches:
    """A prepared DataLoader: micro-batches of this process in training, all batches in evaluation.

    ``len()`` is the number of optimizer steps of an epoch, equal on every number of processes.
    """

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator) -> None:
        self.loader, self._accelerator = loader, accelerator

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        run = accelerator.run
        to_device = DeviceTransfer(run.device)
        if not (accelerator.model.training and torch.is_grad_enabled()):
            accelerator.passes = None
            yield from map(to_device, self.loader)
            return
        micro_batch = None
        for batch in run.batches(self.loader):
            accelerator.passes = OwnPasses(run, batch, micro_batch)
            for micro_batch in accelerator.passes:
                yield to_device(micro_batch.data)
            for each in accelerator.stepped:
                each.end_step()
        accelerator.passes = None

    def __len__(self) -> int:
        return self._accelerator.run.steps_per_epoch(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class _AtLast:
    """An optimizer or a scheduler, which steps with the last micro-batch of a step."""

    def __init__(self, wrapped: Any, accelerator: Accelerator) -> None:
        self._wrapped, self._accelerator = wrapped, accelerator
        self._called: set[str] = set()

    def step(self, *given: Any, **named: Any) -> Any:
        """Steps what is wrapped, in the last micro-batch."""
        self._called.add("step")
        return self._wrapped.step(*given, **named) if self._accelerator.sync_gradients else None

    def zero_grad(self, *given: Any, **named: Any) -> None:
        """Clears the gradients: in the loop of training, at the end of the step."""
        self._called.add("zero_grad")
        if self._accelerator.passes is None:
            self._wrapped.zero_grad(*given, **named)

    def end_step(self) -> None:
        """Clears the gradients of an optimizer.

        Raises:
            ConfigError: the loop did not step and clear it, so gradients of several steps were to be added.
        """
        if not isinstance(self._wrapped, PreparedOptimizer):
            return
        if left_out := {"step", "zero_grad"} - self._called:
            name = type(self._wrapped.wrapped).__name__
            raise ConfigError(
                f"The loop's body did not call {' and '.join(sorted(left_out))}() of {name}. Both belong to each step. "
                "To accumulate gradients, give the Accelerator a larger global_batch and more micro_batches."
            )
        self._called.clear()
        self._wrapped.zero_grad()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
