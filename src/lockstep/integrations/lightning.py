"""A ``Trainer`` for a ``LightningModule``, whose result does not depend on the number of processes.

    from lockstep.integrations.lightning import LightningTrainer   # instead of: from lightning import Trainer
    trainer = LightningTrainer(global_batch=64, max_epochs=10)
    trainer.fit(module, train_loader, val_loader)

``training_step`` runs on micro-batches, so it must return a mean over samples, or (sum, weight). What ``self.log`` is
given there and in ``validation_step`` is averaged over all samples, weighted by the micro-batches' sizes. Optimizer and
scheduler are those of ``configure_optimizers``. Manual optimization, several optimizers, hooks around batches and
gradients, and callbacks of Lightning are refused: ``trainer.run`` has callbacks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.errors import ConfigError
from lockstep.run import Run, init
from lockstep.run.step import DeviceTransfer, evaluating

_NOT_CALLED = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)


class LightningTrainer:
    """Trains a ``LightningModule``. Every process must make the same calls.

    Args:
        global_batch: samples per optimizer step, over all devices together.
        max_epochs: epochs to train for.
        gradient_clip_val: the largest norm of all gradients; none by default.
        options: further ones of ``lockstep.init``, such as ``micro_batches``, ``seed``, ``precision``, ``directory``.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        max_epochs: int,
        gradient_clip_val: float | None = None,
        **options: Any,
    ) -> None:
        self.run: Run = init(global_batch=global_batch, **options)
        self.max_epochs, self.gradient_clip_val = max_epochs, gradient_clip_val
        self.global_rank, self.world_size = self.run.world.rank, self.run.world.world_size
        self.is_global_zero, self.device = self.run.is_main, self.run.device
        self.current_epoch = self.global_step = 0
        self.logger: Any = None
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, float] = {}
        """The last mean of each logged name: of a training step, or of a whole validation set."""
        self._logged: dict[str, Any] = {}

    def log_dict(self, metrics: Mapping[str, Any]) -> None:
        """Takes what the module logs in a step."""
        self._logged.update(metrics)

    def fit(self, module: LightningModule, train_dataloaders: Any, val_dataloaders: Any = None) -> None:
        """Trains, and validates after each epoch. Collective.

        Raises:
            ConfigError: the module has a hook that is not called here, several optimizers, or optimizes by itself.
        """
        run = self.run
        _require_called(module)
        module.trainer = module.fabric = self  # where self.log, self.trainer and self.current_epoch lead to
        optimizer, scheduler, interval, monitor = _configured(module.configure_optimizers())
        others = (optimizer,) if scheduler is None else (optimizer, scheduler)
        module, optimizer, *rest = run.prepare(module, *others)
        training = self._step_by(module.training_step)
        validation = self._step_by(module.validation_step)
        also = self._names(module, training, train_dataloaders)
        checked = {} if val_dataloaders is None else self._names(module, validation, val_dataloaders)
        module.on_fit_start()
        module.on_train_start()
        for epoch in run.epochs(self.max_epochs):
            self.current_epoch = epoch
            module.train()
            module.on_train_epoch_start()
            for batch in run.batches(train_dataloaders):
                _, values = run.backward(batch, _loss, forward=training, also=also)
                self.callback_metrics |= {name: float(value) for name, value in values.items()}
                if self.gradient_clip_val is not None:
                    run.clip_gradients(self.gradient_clip_val)
                optimizer.step()
                optimizer.zero_grad()
                self.global_step += 1
                if interval == "step":
                    rest[0].step()
            if checked:
                module.on_validation_epoch_start()
                self.callback_metrics |= run.evaluate(val_dataloaders, checked, forward=validation)
                module.on_validation_epoch_end()
            module.on_train_epoch_end()
            if interval == "epoch":
                rest[0].step(*([self.callback_metrics[monitor]] if monitor else []))
            shown = "  ".join(f"{name} {value:.4g}" for name, value in self.callback_metrics.items())
            run.print(f"epoch {self.current_epoch}  {shown}")
            if run.options.directory is not None:
                run.save()
        module.on_train_end()
        module.on_fit_end()

    def validate(self, module: LightningModule, dataloaders: Any) -> dict[str, float]:
        """The mean over all samples of what ``validation_step`` logs, after ``fit``. Collective."""
        step = self._step_by(module.validation_step)
        found: dict[str, float] = self.run.evaluate(
            dataloaders, self._names(module, step, dataloaders), forward=step
        )
        return found

    def _step_by(self, step: Callable[..., Any]) -> Callable[[Any], Any]:
        def forward(data: Any) -> Any:
            self._logged.clear()
            result = step(data, 0)
            loss = result["loss"] if isinstance(result, Mapping) else result
            return loss, dict(self._logged)

        return forward

    def _names(
        self, module: LightningModule, step: Callable[[Any], Any], loader: Iterable[Any]
    ) -> dict[str, Callable[[Any, Any], Any]]:
        """A metric for each name that a step logs, found by one on the first batch, without gradients."""
        with evaluating(module):
            _, logged = step(DeviceTransfer(self.device)(next(iter(loader))))
        return {name: _reader(name) for name in logged}


def _loss(output: Any, data: Any) -> Any:
    return output[0]


def _reader(name: str) -> Callable[[Any, Any], Any]:
    def logged(output: Any, data: Any) -> Any:
        return torch.as_tensor(output[1][name])

    return logged


def _require_called(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise ConfigError(
            "The module optimizes by itself (automatic_optimization=False). Write its loop with lockstep.init, "
            "run.backward and optimizer.step()."
        )
    if hooks := [name for name in _NOT_CALLED if is_overridden(name, module, parent=LightningModule)]:
        raise ConfigError(
            f"The module overrides {', '.join(hooks)}, which Lockstep does not call. Use run.add_callback, or "
            "write the loop with lockstep.init."
        )


def _configured(given: Any) -> tuple[Optimizer, Any, str, str | None]:
    """Optimizer, scheduler, its interval ("" for none) and the name that it watches, from ``configure_optimizers``."""
    if isinstance(given, Optimizer):
        return given, None, "", None
    optimizers, schedulers = given, []
    if isinstance(given, Mapping):
        optimizers, schedulers = (
            given["optimizer"],
            [given["lr_scheduler"]] if "lr_scheduler" in given else [],
        )
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list):
        optimizers, schedulers = given
    optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers; one of each "
            "at most can be trained with. For several, write the loop with lockstep.init."
        )
    if not schedulers:
        return optimizers[0], None, "", None
    settings = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    scheduler, monitor = settings["scheduler"], settings.get("monitor")
    if settings.get("frequency", 1) != 1:
        raise ConfigError("The scheduler has a frequency other than 1. Let the scheduler count itself.")
    watches = isinstance(scheduler, ReduceLROnPlateau)
    if watches and monitor is None:
        raise ConfigError("ReduceLROnPlateau needs 'monitor', the name of a logged value.")
    return optimizers[0], scheduler, settings.get("interval", "epoch"), monitor if watches else None
