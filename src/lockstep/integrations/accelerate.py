"""An ``Accelerator`` for scripts written for Hugging Face Accelerate, whose result does not depend on the processes.

    from lockstep.integrations.accelerate import Accelerator   # instead of: from accelerate import Accelerator
    accelerator = Accelerator(global_batch=64)                 # the DataLoader's batch size, for all devices together

The rest of the script stays: ``prepare``, the loop, ``accelerator.backward(loss)``, ``optimizer.step()``. The body of
the training loop runs once for each micro-batch of this process. Optimizers and schedulers step with the last one, as
under Accelerate's ``accumulate``, and gradients are cleared before each step. So a loss that the loop prints is that of
a micro-batch, and ``accelerator.step_loss`` that of a step. Evaluations (loops over a prepared DataLoader after
``model.eval()``, or without gradients) run in full on every process. ``save_state`` and ``load_state`` are those of
checkpoints of the run, which resume with any number of processes.

The first two steps are rehearsed: the body gets a few micro-batches more, which do not count, to find what it keeps
from one to the next, and whether its loss is a mean over samples. See ``lockstep.run.own_passes``.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.batch import map_leaves
from lockstep.distributed.collectives import gather_json
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run import Run, init, resumption
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.run.own_passes import OwnPasses, settings_of
from lockstep.run.step import DeviceTransfer
from lockstep.runtime.output import end_with

logger = logging.getLogger(__name__)

_PRECISIONS = {None: "fp32", "no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_PARTS = "global_batch is what one optimizer step sees, and micro_batches in how many parts it is computed."
_LAYOUT = "The adapter trains with strategy 'ddp'; for another one, use lockstep.init and run.backward."
_FOLDER = "Give a folder to accelerator.save_state, or directory='runs/a' to Accelerator(...)."
_REMEDIES = {
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation_plugin"), _PARTS),
    **dict.fromkeys(("split_batches", "even_batches", "dispatch_batches", "dataloader_config"), _PARTS),
    **dict.fromkeys(("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"), _LAYOUT),
    **dict.fromkeys(("project_dir", "project_config"), _FOLDER),
    "log_with": "Log under 'if accelerator.is_main_process:', with the tracker's own package.",
    "step_scheduler_with_optimizer": "A prepared scheduler steps where the script steps it, once for each step.",
    "rng_types": "Random numbers follow from seed, step and micro-batch on every process.",
    "device_placement": "Batches of a prepared DataLoader are on accelerator.device.",
}
"""Options of Accelerate, and what to do instead."""
_SEVERAL = (
    "The loop's body runs once for each micro-batch of this process, %d for each optimizer step, and a few times more "
    "in the first two steps. Its loss is that of one of these; accelerator.step_loss is the mean loss of the last step."
)
_ACCUMULATION = (
    "To accumulate gradients, give the Accelerator a larger global_batch and more micro_batches, and do not divide the "
    "loss."
)


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
        self,
        *,
        global_batch: int | None = None,
        mixed_precision: str | None = None,
        cpu: bool = False,
        **options: Any,
    ) -> None:
        if mixed_precision not in _PRECISIONS:
            raise ConfigError(f"mixed_precision={mixed_precision!r} is not known: no, bf16 or fp16.")
        if found := [name for name in options if name in _REMEDIES]:
            raise ConfigError(f"Leave {found[0]!r} out of Accelerator(...). {_REMEDIES[found[0]]}")
        self._run: Run = init(global_batch=global_batch, precision=_PRECISIONS[mixed_precision], **options)
        self.left_early = ""
        """Why the result depends on the number of processes, once a loop of training was left before its end."""
        self.asked_whether_last = False
        """True once the script has read ``sync_gradients``."""
        self.step_loss: Tensor | None = None
        """Mean loss of the last step over the global batch, float64, 0-dim, equal on every rank; None before it."""
        self.mixed_precision = mixed_precision or "no"
        self.scaler = None  # checkpoints hold the run's loss scale
        self.device, world = self.run.device, self.run.world
        self.process_index, self.local_process_index = world.rank, world.local_rank
        self.is_main_process, self.is_local_main_process = self.run.is_main, world.local_rank == 0
        self.num_processes = 1
        """The number that a script multiplies its batch, learning rate or length of its schedule with: all that is for
        all processes together already. Their number is ``accelerator.run.world.world_size``."""
        self.passes: OwnPasses | None = None
        """Of the current step of training."""
        self.rows_of_last_batch: int | None = None
        """Where an evaluation is in its last batch, and that is a smaller one."""
        self._passes: OwnPasses | None = None
        """Those of the last ``backward``, and what it found then."""
        self._settings: dict[str, str] = {}
        self._averaged: list[int] = []
        self.model: nn.Module
        atexit.register(self._tell_if_left)
        self.stepped: list[AtLast] = []
        if "accelerate" in sys.modules:
            _ = self.state  # which the logger of accelerate asks for

    @property
    def state(self) -> Any:
        """Accelerate's own view of the processes."""
        from accelerate import PartialState

        found = PartialState(cpu=self.device.type == "cpu")
        # Accelerate sets another number where none is in the environment
        torch.set_num_threads(self._run._session.threads)
        return found

    @property
    def run(self) -> Run:
        """The run; what this class does not have, it has.

        Raises:
            ConfigError: a loop of training was left where no other number of processes would have left it.
        """
        if self.left_early:
            raise ConfigError(self.left_early)
        return self._run

    def print(self, *values: object) -> None:
        """Prints on the main process only."""
        self.run.print(*values)

    @property
    def distributed_type(self) -> Any:
        """Accelerate's word for this process's world."""
        from accelerate import DistributedType

        return DistributedType.NO if self.run.world.world_size == 1 else DistributedType.MULTI_GPU

    @property
    def sync_gradients(self) -> bool:
        """True where the optimizer will be stepped: in the last micro-batch of a step."""
        self.asked_whether_last = True
        return self.is_last

    @property
    def is_last(self) -> bool:
        """As ``sync_gradients``, for this module's own use."""
        return self.passes is None or self.passes.is_last

    def prepare(self, *objects: Any) -> Any:
        """Prepares one model, optimizers, schedulers and DataLoaders, and returns them in their order. Collective.

        DataLoaders may also come in calls of their own. A ``torch.optim.swa_utils.AveragedModel`` of the model may be
        among them, and is part of a checkpoint then.
        """
        given = [each for each in objects if not isinstance(each, DataLoader)]
        models = [each for each in given if isinstance(each, nn.Module) and not isinstance(each, AveragedModel)]
        if len(models) != 1 and (given or not objects):
            raise ConfigError(
                "accelerator.prepare takes one model, all optimizers and schedulers in one call, and DataLoaders in "
                f"any; this one has {len(models)} models. Put several into one nn.ModuleDict."
            )
        placed: dict[int, Any] = {}
        if given:
            given.sort(key=lambda each: each is not models[0])
            self.model, *rest = self.run.prepare(*given) if len(given) > 1 else (self.run.prepare(*given),)
            ready = [each if isinstance(each, nn.Module) else AtLast(each, self) for each in rest]
            self.stepped = [each for each in ready if isinstance(each, AtLast)]
            placed = {id(each): made for each, made in zip(given, [self.model, *ready])}
        returned = tuple(placed[id(each)] if id(each) in placed else Batches(each, self) for each in objects)
        return returned if len(returned) > 1 else returned[0]

    def backward(self, loss: Any) -> None:
        """Runs the backward pass of this micro-batch; with the last one, gradients are summed. Collective.

        Args:
            loss: the mean over the micro-batch's samples (0-dim), one value for each, or the pair (sum, weight).
        """
        if self.passes is None:
            raise ConfigError(
                "accelerator.backward(loss) belongs into a loop over a prepared DataLoader. A batch for an evaluation "
                "that the loop takes by next() opens another loop: take it by next(iter(loader)), which ends at once."
            )
        self._require_equal_settings(self.passes)
        self.passes.backward(loss)
        if self.passes.loss is not None:
            self.step_loss = self.passes.loss

    def _require_equal_settings(self, passes: OwnPasses) -> None:
        """Refuses what the body changes in the middle of a step, by a count of its passes: a learning rate, an average.

        Rates may follow from ``sync_gradients``; an average that is updated in each pass is always wrong.
        """
        parts = self._run.require_prepared().state.parts
        averages = [each for each in parts.modules if isinstance(each, AveragedModel)]
        if self._passes is passes and self._averaged != [int(each.n_averaged) for each in averages]:
            raise ConfigError(
                "The loop's body has updated the AveragedModel between two micro-batches of one step. It runs once for "
                "each of them, so each number of processes would average something else. Update it under 'if "
                "accelerator.sync_gradients:', after optimizer.step()."
            )
        self._averaged = [int(each.n_averaged) for each in averages]
        settings, known = settings_of(parts.optimizers), self._settings
        is_same_step, self._passes, self._settings = self._passes is passes, passes, settings
        if is_same_step and known != settings and not self.asked_whether_last:
            changed = next(name for name in settings if settings[name] != known.get(name))
            raise ConfigError(
                f"The loop's body has changed {changed} between two micro-batches of one step. It runs once for each "
                "of them, so each number of processes would train with other values. Use a scheduler that "
                "accelerator.prepare was given, or compute the value from accelerator.run.position.step."
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clips the gradients of these parameters together, once they are summed; None before. Collective."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ has the 2-norm only, not norm_type={norm_type}.")
        if not self.is_last:
            return None
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if {id(each) for each in self.run.strategy.trainable().values()} <= {id(each) for each in given}:
            return self.run.clip_gradients(max_norm)
        return nn.utils.clip_grad_norm_(given, max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Bounds every entry of all gradients, once they are summed."""
        if self.is_last:
            nn.utils.clip_grad_value_(parameters, clip_value)

    def gather(self, values: Any) -> Any:
        """The same values: every process evaluates all samples."""
        if self.passes is not None and self.model.training:
            raise ConfigError(
                "accelerator.gather in a loop of training would need the other processes' micro-batches. Use "
                "run.backward(batch, loss, also={...}), or evaluate after model.eval()."
            )
        return values

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """The same values, with as many rows as the last batch of an evaluation has: it may be smaller than others."""
        values, rows = self.gather(values), self.rows_of_last_batch
        if use_gather_object:
            return values[:rows]
        return map_leaves(values, lambda leaf: leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The model."""
        self.run.require_prepared()
        return model

    def wait_for_everyone(self) -> None:
        """Waits until all processes have come here; between steps, compares their parameters, too. Collective.

        Does nothing between two micro-batches of a step, of which processes have different numbers.
        """
        if not self.is_last:
            return
        self._wait()
        if self.stepped and self.passes is None:
            self.run.fingerprint()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A context that the main process leaves before the others enter it. Collective."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A context that the first process of each host leaves before the others enter it. Collective."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self._wait()
        yield
        if goes_first:
            self._wait()

    def _wait(self) -> None:
        gather_json(None, self.run._session.group, self.device)

    def save(self, value: Any, path: Any, **_: Any) -> None:
        """Saves with ``torch.save`` on the main process."""
        if self.run.is_main:
            torch.save(value, path)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The tensors of the model, which every process holds whole."""
        return dict(model.state_dict())

    def save_state(self, output_dir: Path | str | None = None, **_: Any) -> str:
        """Writes a checkpoint of the run below a folder. Collective.

        Args:
            output_dir: the folder; by default that of ``Accelerator(directory=...)``.

        Returns:
            The folder.

        Raises:
            ConfigError: in the middle of an optimizer step, or there is no folder.
        """
        if not self.is_last:
            raise ConfigError(
                "accelerator.save_state() in the middle of an optimizer step, of which other processes have other "
                "micro-batches, would lose its gradients. Call it under 'if accelerator.sync_gradients:', after "
                "optimizer.step()."
            )
        for each in self.stepped:
            if each.has_stepped:
                each.clear()
        self.run.save(wait=True, directory=output_dir)
        return str(output_dir or self.run.options.directory)

    def load_state(self, input_dir: Path | str | None = None, **_: Any) -> None:
        """Goes on from the newest checkpoint below a folder of ``save_state``, after ``prepare``. Collective.

        The run stands where it was saved then: the next loop over the training data has what is left of that epoch.

        Args:
            input_dir: the folder; by default that of ``Accelerator(directory=...)``.

        Raises:
            CheckpointError: there is none, or it is of another run.
            ConfigError: training has begun.
        """
        run, folder = self.run, input_dir or self.run.options.directory
        prepared = run.require_prepared()
        if run.position.step or self.step_loss is not None:
            raise ConfigError(
                "accelerator.load_state() after steps of training. Call it once, after accelerator.prepare and before "
                "the loop; a program that is to go back to a checkpoint is started anew."
            )
        options = replace(run.options, directory=folder, resume="auto")
        if folder is None or not resumption.resume(prepared.state, options, run.fingerprint):
            raise CheckpointError(
                f"accelerator.load_state() found no checkpoint of accelerator.save_state() in {folder}."
            )
        run.extra = prepared.state.extra
        prepared.gradients.resume()
        run._agreed_data.resume(prepared.state.data)

    def skip_first_batches(self, dataloader: Batches, num_batches: int = 0) -> Batches:
        """The DataLoader: after ``load_state``, its loop begins where the checkpoint was written.

        Raises:
            ConfigError: that is not after ``num_batches`` optimizer steps of the epoch.
        """
        done = self.run.position.done % self.run.steps_per_epoch(dataloader.loader)
        if num_batches != done:
            raise ConfigError(
                f"accelerator.skip_first_batches was asked to skip {num_batches} batches, and the run stands after "
                f"{done} optimizer steps of its epoch. accelerator.load_state moves there by itself; "
                "leave out what is skipped."
            )
        return dataloader

    def autocast(self) -> AbstractContextManager[object]:
        """The context of ``mixed_precision``. Loops of training run in it already, those of evaluation do not."""
        return self.run._precision.forward()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Does nothing: what steps does so with the last micro-batch."""
        return nullcontext()

    no_sync = accumulate

    def end_training(self) -> None:
        """Does nothing: the run ends with the program.

        Raises:
            ConfigError: a loop of training was left where no other number of processes would have left it.
        """
        if self.passes is not None and not self.left_early:
            self.left_early = left_early(self)
        self.run.require_prepared()

    def _tell_if_left(self) -> None:
        if self.passes is not None and not hasattr(sys, "last_value") and (why := left_early(self)):
            end_with(ConfigError(why))  # a generator still holds the loop, such as cycle(loader)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"lockstep.integrations.accelerate.Accelerator has no {name!r}. accelerator.run, a lockstep.Run, has "
            "what docs/moving.md names: save and resume, evaluate, predict, callbacks."
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
        with closing(steps):
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
