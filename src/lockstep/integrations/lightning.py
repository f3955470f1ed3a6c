"""A ``Trainer`` for a ``LightningModule``, whose result does not depend on the number of processes.

    from lockstep.integrations.lightning import LightningTrainer   # instead of: from lightning import Trainer
    trainer = LightningTrainer(global_batch=64, max_epochs=10)
    trainer.fit(module, train_loader, val_loader)

``training_step`` runs on micro-batches, so it must return a mean over samples, or (sum, weight). What it logs is
averaged over the samples of the global batch (``on_step``) and of the epoch (``on_epoch``), what ``validation_step``
logs over the whole set; the names in ``callback_metrics`` are Lightning's. Optimizer and scheduler are those of
``configure_optimizers``. Manual optimization, several optimizers, hooks around batches and gradients, and callbacks of
Lightning are refused: ``trainer.run`` has callbacks of its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.core.generators import generators_kept
from lockstep.data.batch import MicroBatch
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.integrations.lightning_log import (
    Averages,
    Logged,
    ModuleLog,
    StepLog,
    Values,
    gathered,
    unequal_means,
)
from lockstep.numerics.hidden_state import Snapshot, evaluating
from lockstep.run import Run, init
from lockstep.run.checks.rows import own_rows, together
from lockstep.run.checks.short_step import Buffers
from lockstep.run.evaluation import evaluation
from lockstep.runtime.events import KeepsExtra
from lockstep.strategies.ddp import Replicated
from lockstep.text import shorten

logger = logging.getLogger(__name__)

_CALLED = frozenset(
    {
        *("training_step", "validation_step", "test_step", "forward"),
        *("configure_optimizers", "configure_model", "prepare_data", "setup", "teardown"),
        *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
        *("on_train_epoch_start", "on_train_epoch_end"),
        *(f"on_{stage}_{when}" for stage in ("validation", "test") for when in ("start", "end")),
        *(f"on_{stage}_epoch_{when}" for stage in ("validation", "test") for when in ("start", "end")),
        *("train_dataloader", "val_dataloader", "test_dataloader"),  # loaders are given to fit
    }
)
_OTHER_METHODS = ("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "clip_gradients")
_HOOKS = ("on_", "configure_", "transfer_batch")
_LOADERS = (
    "LightningTrainer takes one DataLoader or data set for each of training and validation, and was given a {}. Give "
    "it module.train_dataloader() or datamodule.train_dataloader(), and evaluate further sets with trainer.validate."
)
_REMEDIES = {
    "callbacks": "Use trainer.run.add_callback, or hooks of the module; trainer.should_stop = True in "
    "on_train_epoch_end or on_validation_epoch_end stops training.",
    "accumulate_grad_batches": "global_batch is what one optimizer step sees, micro_batches in how many parts.",
    "logger": "Log trainer.callback_metrics in hooks of the module, with the logger's own package.",
    **dict.fromkeys(("accelerator", "devices"), "lockstep run --devices says where to train."),
    "num_nodes": "lockstep run says on which hosts to train.",
    "max_steps": "Stop with trainer.should_stop = True in on_train_epoch_end.",
    **dict.fromkeys(("enable_checkpointing", "default_root_dir"), "Give directory= and, to go on, resume='auto'."),
    "gradient_clip_algorithm": "gradient_clip_val is the largest norm of all gradients.",
}


_KEPT = (
    "%s changes %s. Each process evaluates a part of the data, so a number that a hook computes from it depends on the "
    "number of processes. Log means in the step, or compute the number in the hook with "
    "trainer.run.evaluate or trainer.run.predict."
)


class LightningTrainer:
    """Trains a ``LightningModule``. Every process must make the same calls.

    Args:
        global_batch: samples per optimizer step, over all devices together.
        max_epochs: epochs to train for.
        gradient_clip_val: the largest norm of all gradients; none by default.
        options: further ones of ``lockstep.init``, such as ``micro_batches``, ``seed``, ``precision``, ``directory``.

    Raises:
        ConfigError: an option that Lockstep does not have.
    """

    barebones = sanity_checking = fast_dev_run = predicting = False
    logger = datamodule = progress_bar_callback = None

    def __init__(
        self, *, global_batch: int, max_epochs: int, gradient_clip_val: float | None = None, **options: Any
    ) -> None:
        if found := [name for name in options if name in _REMEDIES]:
            raise ConfigError(f"LightningTrainer has no {found[0]!r}. {_REMEDIES[found[0]]}")
        self.run: Run = init(global_batch=global_batch, **options)
        self.max_epochs, self.gradient_clip_val = max_epochs, gradient_clip_val
        self.global_rank, self.world_size = self.run.world.rank, self.run.world.world_size
        self.local_rank = self.run.world.local_rank
        self.is_global_zero, self.device = self.run.is_main, self.run.device
        self.current_epoch = 0
        self.global_step = 0
        """Optimizer steps done, those before a resumption too."""
        self.should_stop = False
        """Set by a hook of an epoch: training ends with that epoch."""
        self.training = self.validating = self.testing = False
        self.num_training_batches = 0
        """Optimizer steps of an epoch."""
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        """The last mean of each logged name, float64, 0-dim: of a step, an epoch, or a whole validation set."""
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[_Schedule] = []
        self._recorder = self.strategy = self._results = ModuleLog()
        self._logger_connector = self._accelerator_connector = self._recorder
        self._batch_idx = 0
        self._epoch_means = Averages()
        self._checked: dict[str, set[str]] = {}
        """The names of which it is known whether they are means, by the step that logged them."""

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole training."""
        return self.num_training_batches * self.max_epochs

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"LightningTrainer has no {name!r}. trainer.run, a lockstep.Run, has what docs/moving.md names: save and "
            "resume, evaluate, predict, callbacks."
        )

    def fit(self, module: LightningModule, train_dataloaders: Any, val_dataloaders: Any = None) -> None:
        """Trains, and validates after each epoch. Collective.

        Raises:
            ConfigError: the module has a hook that is not called here, several optimizers, optimizes by itself, or logs
                what is not a mean over samples.
        """
        run = self.run
        _require_called(module)
        _require_loaders(train_dataloaders, val_dataloaders)
        stand_in: Any = self
        module.trainer = stand_in  # where self.log, self.trainer and self.current_epoch lead to
        if run.world.local_rank == 0:
            module.prepare_data()
        gather_json(None, run._session.group, run.device)  # the others wait for the data
        module.setup("fit")
        module.configure_model()
        self.num_training_batches = run.steps_per_epoch(train_dataloaders, model=module)
        optimizer, schedule = _configured(module.configure_optimizers())
        others = (optimizer,) if schedule is None else (optimizer, schedule.scheduler)
        module, optimizer, *rest = run.prepare(module, *others)
        if schedule is not None:
            schedule.scheduler = rest[0]
            self.lr_scheduler_configs = [schedule]
        self.optimizers = self._recorder._lightning_optimizers = [optimizer]
        self.current_epoch, self.global_step = run.position.epoch, run.position.step
        kept = run.extra.get("metrics", {})
        self.callback_metrics = {name: torch.tensor(each, dtype=torch.float64) for name, each in kept.items()}
        run.add_callback(KeepsExtra(run, "metrics", self._kept))
        self._call(module, "on_fit_start")
        self._call(module, "on_train_start")
        for epoch in run.epochs(self.max_epochs):
            self.current_epoch = epoch
            self._train_epoch(module, train_dataloaders)
            self._step_schedule("epoch", epoch, monitors=False)
            if val_dataloaders is not None and is_overridden("validation_step", module, LightningModule):
                self._evaluate(module, "validation", val_dataloaders)
            self.callback_metrics |= self._epoch_means.means(of_step=False)
            self._call(module, "on_train_epoch_end")
            self._step_schedule("epoch", epoch, monitors=True)
            shown = "  ".join(f"{name} {float(value):.4g}" for name, value in self.callback_metrics.items())
            run.print(f"epoch {self.current_epoch}  {shown}")
            if run.options.directory is not None:
                run.save()
            if self.should_stop:
                break
        self._call(module, "on_train_end")
        self._call(module, "on_fit_end")
        module.teardown("fit")

    def validate(self, module: LightningModule, dataloaders: Any) -> list[dict[str, float]]:
        """The means over all samples of what ``validation_step`` logs, after ``fit``. Collective.

        Returns:
            A list of one dict, as Lightning's.
        """
        return [self._evaluate(module, "validation", dataloaders)]

    def test(self, module: LightningModule, dataloaders: Any) -> list[dict[str, float]]:
        """As ``validate``, of what ``test_step`` logs."""
        return [self._evaluate(module, "test", dataloaders)]

    def _train_epoch(self, module: LightningModule, loader: Any) -> None:
        """Trains for the rest of an epoch, and leaves its means."""
        run, optimizer = self.run, self.optimizers[0]
        step, forward = "training_step", self._forward(module, "training_step")
        self.training = True
        if run.position.done == 0:
            run.extra["logged"] = {}
            self._call(module, "on_train_epoch_start")
        self._epoch_means = Averages(run.extra.get("logged"))
        for batch in run.batches(loader):
            self._batch_idx, log = batch.plan.position, StepLog()
            run.backward_by(run.strategy.backward, batch, lambda output, _: output[0], forward, log)
            reasons = self._no_means(module, step, forward, batch.micro_batches, log.values)
            logged = gathered(step, log.values, reasons, run.strategy)
            self._epoch_means.add_all(logged)
            run.extra["logged"] = self._epoch_means.sums
            self.callback_metrics |= logged.means(of_step=True)
            if self.gradient_clip_val is not None:
                (members,) = run.require_prepared().state.model.members
                for name, each in run.strategy.trainable().items():
                    if not any(name in group for group in members):
                        each.grad = None  # Lightning clips those of the optimizer
                run.clip_gradients(self.gradient_clip_val)
            optimizer.step()
            optimizer.zero_grad()
            self.global_step += 1
            for monitors in (False, True):
                self._step_schedule("step", self._batch_idx, monitors=monitors)
            if self.should_stop:
                raise ConfigError(
                    "training_step set trainer.should_stop. It runs on micro-batches, so each process would stop "
                    "elsewhere. Set it in on_train_epoch_end or on_validation_epoch_end."
                )
        self.training = False

    def _evaluate(self, module: LightningModule, stage: str, loader: Any) -> dict[str, float]:
        """The means of what a step of evaluation logs, with the hooks around it."""
        _require_loaders(loader)
        if self.run._prepared is None:
            raise ConfigError("trainer.validate() and trainer.test() come after trainer.fit().")
        run, step, values, reasons = self.run, f"{stage}_step", dict[int, Any](), dict[str, str]()
        forward, names = self._forward(module, step), f"on_{stage}"
        self.validating, self.testing = stage == "validation", stage == "test"
        with run.span("evaluate"), evaluating(module):
            found = self._call(module, f"{names}_start") | self._call(module, f"{names}_epoch_start")
            is_new = run._session.group is not None and step not in self._checked
            before = Snapshot({"": module}, restorable=False) if is_new else None
            with evaluation(run, loader, None, forward, None, False) as opened:
                for _, micro_batch in opened.rounds():
                    if micro_batch is None:
                        continue
                    self._batch_idx, is_spare = micro_batch.k, micro_batch.k >= opened.loader.count
                    output, _ = opened.forward(micro_batch)
                    if not is_spare:
                        new = {micro_batch.k: (len(micro_batch), output[1])}
                        values |= new
                        reasons |= self._no_means(module, step, forward, (micro_batch,), new)
            means = gathered(step, values, reasons, run.strategy).means(of_step=False)
            self.callback_metrics |= means
            if before is not None:
                self._warn_of_parts(module, step, before)
            found |= means | self._call(module, f"{names}_epoch_end") | self._call(module, f"{names}_end")
        self.validating = self.testing = False
        results = {name: float(value) for name, value in found.items()}
        for call in run._events.evaluation:
            call(run.position.step, results)
        return results

    def _warn_of_parts(self, module: LightningModule, step: str, before: Snapshot) -> None:
        """Warns of what the module keeps of an evaluation: of the data of this process. Collective."""
        found = before.changed(Snapshot({"": module}, restorable=False))
        # Objects of torchmetrics, which gather what others have, are modules of their own.
        kept = {each.partition("[")[0] for each in found if " of the model" in each}
        everyone = self.run.strategy.gather_records(sorted(each for each in kept if each.endswith("model")))
        self._checked.setdefault(step, set())
        if self.is_global_zero and any(everyone):
            logger.warning(_KEPT, step, shorten(next(filter(None, everyone)), 3))

    def _kept(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.callback_metrics.items()}

    def _call(self, module: LightningModule, hook: str) -> dict[str, Tensor]:
        """Calls a hook; what it logs is known at once, and returned."""
        self._recorder.begin()
        module._current_fx_name = hook
        getattr(module, hook)()
        module._current_fx_name = None
        logged = {name: each.value.double() for name, each in self._recorder.end().items()}
        self.callback_metrics |= logged
        return logged

    def _forward(self, module: LightningModule, step: str) -> Callable[[Any], tuple[Any, dict[str, Logged]]]:
        """Gives the loss and what is logged for the data of a micro-batch."""
        function = getattr(module, step)
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
        takes_index = (
            kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds
        )

        def forward(data: Any) -> tuple[Any, dict[str, Logged]]:
            self._recorder.begin()
            module._current_fx_name = step
            result = function(data, self._batch_idx) if takes_index else function(data)
            module._current_fx_name = None  # as checkpoints are to have it
            if isinstance(result, Mapping) and "loss" not in result and step == "training_step":
                raise ConfigError(
                    "training_step returned a dict without 'loss'. Add the loss to it, or return it alone."
                )
            loss = result["loss"] if isinstance(result, Mapping) and "loss" in result else result
            return loss, self._recorder.end()

        return forward

    def _no_means(
        self,
        module: LightningModule,
        step: str,
        forward: Callable[[Any], Any],
        micro_batches: tuple[MicroBatch, ...],
        values: Values,
    ) -> dict[str, str]:
        """The values that are not means over samples, of those that a step has logged here for the first time."""
        run, known = self.run, self._checked.setdefault(step, set())
        new = {name for _, entries in values.values() for name in entries} - known
        forward_pass = run.require_prepared().forward_pass
        if not new or run.options.checks == "off" or not isinstance(run.strategy, Replicated):
            return {}
        data, samples = together(tuple(each for each in micro_batches if new & values[each.k][1].keys()))
        if samples > 1:
            known |= new

        def logged(rows: slice) -> dict[str, Logged]:
            part = own_rows(data, rows)
            (_, found), _ = forward_pass.output_and_target(part, forward, module, None)
            return {name: each for name, each in found.items() if name in new}

        buffers = Buffers((module,))
        before = Snapshot({"": module}, buffers.tensors)
        try:
            with evaluating(module), generators_kept(), run._events.silenced():
                return unequal_means(logged, samples, 1e-4 if run.options.precision == "fp32" else 0.1)
        finally:
            before.restore()
            buffers.restore()
            run.require_prepared().state.model.randomness.leave()

    def _step_schedule(self, interval: str, number: int, *, monitors: bool) -> None:
        """Steps the scheduler where a step or an epoch of that number ends its interval.

        Those that monitor a value step when all hooks of the epoch are done, others before them, as Lightning's.
        """
        for each in self.lr_scheduler_configs:
            if (each.monitor is not None) != monitors:
                continue
            if each.interval != interval or (number + 1) % each.frequency:
                continue
            if each.monitor is None:
                each.scheduler.step()
            elif each.monitor in self.callback_metrics:
                each.scheduler.step(float(self.callback_metrics[each.monitor]))
            else:
                raise ConfigError(
                    f"ReduceLROnPlateau monitors {each.monitor!r}, which nothing has logged by the end of the "
                    f"{interval}. Logged are: {', '.join(self.callback_metrics) or 'none'}."
                )


@dataclass
class _Schedule:
    """A scheduler and when it steps, as ``configure_optimizers`` says."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    """The name of the value that ``ReduceLROnPlateau`` is given."""


def _require_loaders(*given: Any) -> None:
    """Raises ``ConfigError`` for what may be several loaders."""
    for each in given:
        if isinstance(each, list | tuple | Mapping | LightningDataModule):
            raise ConfigError(_LOADERS.format(type(each).__name__))


def _require_called(module: LightningModule) -> None:
    """Raises ``ConfigError`` for a module that asks for what is not done here."""
    if not module.automatic_optimization:
        raise ConfigError(
            "The module optimizes by itself (automatic_optimization=False). Write its loop with lockstep.init, "
            "run.backward and optimizer.step()."
        )
    names = [name for name in dir(LightningModule) if name.startswith(_HOOKS) or name in _OTHER_METHODS]
    hooks = [name for name in names if name not in _CALLED and callable(getattr(LightningModule, name))]
    hooks = [name for name in hooks if "_predict_" not in name]  # predict is not here
    if overridden := [name for name in hooks if is_overridden(name, module, parent=LightningModule)]:
        raise ConfigError(
            f"The module overrides {', '.join(overridden)}, which Lockstep does not call. Use run.add_callback, or "
            "write the loop with lockstep.init."
        )


def _configured(given: Any) -> tuple[Optimizer, _Schedule | None]:
    """Optimizer and scheduler, from what ``configure_optimizers`` returned in any of Lightning's forms."""
    if isinstance(given, list | tuple) and len(given) == 1 and isinstance(given[0], Mapping):
        given = given[0]
    optimizers: Any = given
    schedulers: Any = []
    monitor: str | None = None
    if isinstance(given, Mapping):
        optimizers, monitor = given.get("optimizer"), given.get("monitor")
        schedulers = given["lr_scheduler"] if given.get("lr_scheduler") is not None else []
    elif isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], list | tuple):
        optimizers, schedulers = given
    optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    schedulers = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    if len(optimizers) != 1 or len(schedulers) > 1 or not isinstance(optimizers[0], Optimizer):
        kinds = ", ".join(type(each).__name__ for each in optimizers)
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({kinds}) and {len(schedulers)} schedulers; "
            "one optimizer, and one scheduler at most, can be trained with. For others, write the loop with "
            "lockstep.init."
        )
    if not schedulers:
        return optimizers[0], None
    settings = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    scheduler, monitor = settings["scheduler"], settings.get("monitor", monitor)
    watches = settings.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    interval, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    schedule = _Schedule(scheduler, interval, frequency, monitor if watches else None)
    if schedule.interval not in ("epoch", "step") or schedule.frequency < 1:
        raise ConfigError(
            f"The scheduler has interval={schedule.interval!r} and frequency={schedule.frequency!r}. The interval is "
            "'epoch' or 'step', the frequency 1 or more."
        )
    if watches and monitor is None:
        raise ConfigError("ReduceLROnPlateau needs 'monitor', the name of a logged value.")
    return optimizers[0], schedule
