"""Trains a whole job: epochs of steps, evaluation, checkpoints, early stop, one line per epoch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.config.job import CheckpointConfig, TrainingConfig
from lockstep.data.adopt import adopt
from lockstep.data.batch import Batch
from lockstep.data.labels import known_classes
from lockstep.errors import ConfigError, LockstepError
from lockstep.loggers import Logger
from lockstep.run import Run
from lockstep.runtime.devices import is_gpu, peak_memory
from lockstep.runtime.error_record import users_lines
from lockstep.runtime.events import Callback
from lockstep.text import plural
from lockstep.trainer.state import Meter, Progress, TrainingOutcome, TrainingParts

WEIGHTS = "model.safetensors"
"""The file of a run folder that has the weights of the last step."""

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max

AVERAGE = "average.safetensors"
"""The same of their moving average, where the job has one."""


class Trainer(Callback):
    """Runs the loop of a job. Every rank makes the same calls.

    The run is prepared with the model and optimizer of ``parts``. The logger is a null logger on all ranks but the main
    one.
    """

    def __init__(
        self,
        run: Run,
        parts: TrainingParts,
        settings: TrainingConfig,
        saving: CheckpointConfig,
        log_every: int,
        logger: Logger,
    ) -> None:
        self.run, self._parts, self._logger = run, parts, logger
        self.loss = parts.loss
        self._settings, self._saving, self._log_every = settings, saving, log_every
        self._meter = Meter(run.strategy, parts.accuracy)
        self._learning_rates: list[Any] = []
        self._have_differed = False  # so that a curve does not end where they meet
        metric = "validation_loss" if parts.accuracy is None else "validation_accuracy"
        self._progress = Progress(metric, judged=parts.judged)
        is_same = self._progress.load_state_dict(run.extra.get("trainer", {}))
        self._values: dict[str, float] = dict(run.extra.get("values", {})) if is_same else {}
        self._has_other_data = bool(run.extra.get("other_data"))  # than the run had at first
        self._first_step = run.position.step
        self._saved_step = run.position.step or -1
        self._ends_within_epoch = False
        self._is_within_epoch = run.position.inside  # what follows the steps is not in that checkpoint
        run.add_callback(self._meter)
        run.add_callback(self)

    def fit(self) -> TrainingOutcome:
        """Trains to the end, or until evaluation stops improving. Collective.

        Raises:
            ConfigError: the run was resumed after more epochs or steps than it is to have.
        """
        self._require_not_past_its_end()
        self._record_best()  # a run that was killed between a save and its record had not come to it
        position = self.run.position
        samples = len(adopt(self._parts.training_set).dataset)
        if position.samples not in (0, samples) and not position.inside:
            self._has_other_data = True
            if self.run.is_main:
                logger.warning(
                    "The training set has %s, and had %d before the stop. The result is not that of one job from "
                    "beginning to end.",
                    *(plural(samples, "sample"), position.samples),
                )
        is_before_evaluation = position.inside and position.done == self.steps_per_epoch
        if is_before_evaluation or not self._is_over(position.step):
            for epoch in self.run.epochs(self._settings.epochs):
                trained = self.train_epoch(epoch)
                if self._ends_within_epoch:
                    break
                self._finish_epoch(epoch, trained)
                if self._is_over(self.run.position.step):
                    break
            if self._ends_within_epoch:
                self._finish_early(epoch, trained)
        place = self.run.position
        epochs = place.epoch + (place.done == self.steps_per_epoch)
        is_early = epochs < self._settings.epochs and place.step != self._settings.max_steps
        if self._has_stopped_improving and is_early and self.run.is_main:
            logger.info(
                "Training ends early: %s has not improved in the last %s (training.early_stop).",
                *(self._progress.metric, plural(self._progress.since_best, "evaluation")),
            )
        return self._end()

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """The steps of one epoch; returns its means."""
        run, batches = self.run, self.batches()
        done, settings = run.position.done, self._settings
        self._logger.begin(
            epoch,
            epochs=settings.epochs,
            start=run.position.step - done,
            steps=self.steps_per_epoch,
            done=done,
            total=settings.max_steps,
        )
        self._meter.begin(epoch, run.extra.get("epoch"))
        last = self.steps_per_epoch - 1
        for batch in batches:
            self.train_step(batch)
            step, is_last = batch.plan.step + 1, batch.plan.position == last
            if step % self._log_every == 0 or is_last or step == settings.max_steps:
                with run.span("log"):
                    self._logger.log(step, self._read(), self._meter.means())
                self._meter.go_on()
            if not is_last and self._pause_within(epoch, step):
                self._ends_within_epoch = True
                break
        self._meter.collect()  # of the steps since the last reading, where the run ends within the epoch
        self._meter.wait_for_counts()
        return self._meter.means()

    def _pause_within(self, epoch: int, step: int) -> bool:
        """Evaluates and saves after a step within an epoch, where due; returns whether the run ends. Collective.

        The time that this takes is no time of training.
        """
        settings = self._settings
        evaluates = self._is_due(step, settings.evaluate_every_steps) and step != settings.max_steps
        saves, best = self._is_due(step, self._saving.every_steps), False
        if evaluates or saves:
            self._meter.collect()
            if evaluates:
                best = self._evaluate_and_judge(epoch, step)
                with self.run.span("log"):
                    if self._has_stopped_improving and step % self._log_every:
                        self._logger.log(step, self._read(), self._meter.means())
                    self._logger.log(step, self._values)
            if best or saves:
                self._save(step, best=best)
            self._meter.go_on()
        return self._is_over(step)

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return bool(every) and step % every == 0

    def train_step(self, batch: Batch) -> Tensor:
        """Forward, loss, backward and reduction; clip; update. Returns the mean loss over the global batch."""
        parts = self._parts
        loss: Tensor = self.run.backward(batch, self.loss)
        if self._settings.clip_norm is not None:
            self.run.clip_gradients(self._settings.clip_norm)
        rates = [group["lr"] for group in parts.optimizer.param_groups]
        if wrong := [rate for rate in rates if isinstance(rate, float | int) and not 0 <= rate <= _LARGEST]:
            raise ConfigError(
                f"The learning rate of step {batch.plan.step} is {wrong[0]}, and should be 0 or more and finite. "
                "Correct optimizer.lr, or the table [schedule]."
            )
        self._learning_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        if parts.average is not None:
            parts.average.update_parameters(parts.model)
        self._step_scheduler(batch.plan.step + 1)
        return loss

    def _step_scheduler(self, step: int) -> None:
        scheduler = self._parts.scheduler
        try:
            scheduler.step()
        except LockstepError:
            raise
        except Exception as error:
            raise ConfigError(
                f"schedule: {type(scheduler).__name__} has no learning rate for step {step}: "
                f"{type(error).__name__}: {error}. Correct its arguments.{users_lines(error)}"
            ) from error

    def _read(self) -> dict[str, float]:
        """The means since the last reading, with the learning rate and the loss scale of the last step. Collective."""
        values = self._meter.read()
        rates = [float(rate) for rate in self._learning_rates]
        names = [f"learning_rate_{number}" for number in range(1, len(rates) + 1)]
        self._have_differed |= len({*rates}) > 1
        values |= zip(names if self._have_differed else ["learning_rate"], rates)
        if self.run.options.precision == "fp16":
            values["loss_scale"] = self._meter.scale
        return values

    def on_save_begin(self, step: int) -> None:
        """Puts beside a checkpoint where the run stands, whoever asked for it. Collective."""
        self._meter.collect()
        self._has_other_data |= self.run._agreed_data.found_others
        extra = {"trainer": self._progress.as_dict(), "values": self._values}
        self.run.extra = {**extra, "other_data": self._has_other_data, "epoch": self._meter.as_dict()}

    def batches(self) -> Any:
        """The steps of an epoch. Collective."""
        parts, settings = self._parts, self._settings
        return self.run.batches(parts.training_set, drop_last=settings.drop_last, workers=parts.workers)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.run.steps_per_epoch(self._parts.training_set, drop_last=self._settings.drop_last)

    def _finish_epoch(self, epoch: int, trained: dict[str, float]) -> None:
        step, settings = self.run.position.step, self._settings
        last, best = epoch + 1 == settings.epochs or step == settings.max_steps, False
        values = self._of_epoch(trained)
        by_epochs = (epoch + 1) % settings.evaluate_every == 0
        is_due = last or by_epochs or self._is_due(step, settings.evaluate_every_steps)
        if self._parts.validation_set is not None and is_due:
            best = self._evaluate_and_judge(epoch, step, repeatable=True)
            values |= self._values
        last = last or self._is_over(step)
        self._log_epoch(epoch, values, is_last=last)
        every = self._saving.every_epochs
        is_due = (bool(every) and (epoch + 1) % every == 0) or self._is_due(step, self._saving.every_steps)
        if is_due or best or last:
            self._save(step, best=best)

    def _of_epoch(self, trained: dict[str, float]) -> dict[str, float]:
        """The entries in the record of an epoch beside the evaluation."""
        skipped = {"skipped_steps": float(self.run.skipped_steps)} if self.run.skipped_steps else {}
        return {**trained, **self.run.strategy.metrics(), **skipped}

    def _log_epoch(self, epoch: int, values: dict[str, float], *, is_last: bool) -> None:
        with self.run.span("log"):
            self._logger.epoch(epoch, self.run.position.step, values, is_last=is_last)

    def _finish_early(self, epoch: int, trained: dict[str, float]) -> None:
        """Ends the run within an epoch, after ``max_steps`` or where evaluation stopped improving. Collective."""
        step, values, best = self.run.position.step, self._of_epoch(trained), False
        if self._parts.validation_set is not None and step == self._settings.max_steps:
            best = self._evaluate_and_judge(epoch, step)
        values |= {**self._values, "epochs_done": epoch + self.run.position.done / self.steps_per_epoch}
        self._log_epoch(epoch, values, is_last=True)
        self._save(step, best=best)

    def _evaluate_and_judge(self, epoch: int, step: int, *, repeatable: bool = False) -> bool:
        """Evaluates; returns whether the results are the best so far. Collective."""
        self._values = self._evaluate(repeatable=repeatable)
        return self._progress.judge(epoch, step, self._values)

    def _evaluate(self, *, repeatable: bool = False) -> dict[str, float]:
        parts = self._parts
        metrics: dict[str, Callable[..., Any]] = {"validation_loss": parts.loss}
        if parts.accuracy is not None:
            metrics["validation_accuracy"] = parts.accuracy
        metrics |= {f"validation_{name}": each for name, each in parts.metrics.items()}
        results = self.run.evaluate(
            *(parts.validation_set, metrics),
            model=parts.average,
            workers=parts.workers,
            repeatable=repeatable,
        )
        return dict(results)

    def _save(self, step: int, *, best: bool) -> None:
        """Writes a checkpoint, unless that of this step has all that this one would; notes that it is the best."""
        if self.run.options.directory is not None and (step != self._saved_step or self._is_within_epoch):
            self.run.save()
            self._saved_step, self._is_within_epoch = step, False
        if best:
            self._record_best()

    def _record_best(self) -> None:
        """Names the best checkpoint in the run folder, which keeps it from then on."""
        progress, directory = self._progress, self.run.options.directory
        if self.run.is_main and directory is not None and progress.best is not None:
            record = checkpoint.Best(progress.best_step, progress.metric, progress.best)
            checkpoint.write_best(Path(directory), record)

    def _require_not_past_its_end(self) -> None:
        position, settings = self.run.position, self._settings
        epochs = position.epoch + bool(position.inside)
        for name, done, most in (
            ("epochs", epochs, settings.epochs),
            ("max_steps", position.step, settings.max_steps),
        ):
            if most is not None and done > most:
                raise ConfigError(
                    f"The checkpoint has step {position.step}, of epoch {epochs}, and training.{name} is {most}, so "
                    f"the result would not be that of {most}. Set training.{name} to {done} or more, or resume from an "
                    "earlier checkpoint."
                )

    def _is_over(self, step: int) -> bool:
        """True after the last of ``max_steps``, or where evaluation has stopped improving."""
        return step == self._settings.max_steps or self._has_stopped_improving

    @property
    def _has_stopped_improving(self) -> bool:
        patience = self._settings.early_stop
        return bool(patience) and self._progress.since_best >= patience

    def _most_of_a_rank(self) -> tuple[float, int]:
        """Bytes per step of the rank that sends most, and the peak memory of the one that takes most. Collective."""
        strategy = self.run.strategy
        own = torch.tensor(
            [strategy.bytes_sent, peak_memory(strategy.device)], dtype=torch.float64, device=strategy.device
        )
        sent, memory = strategy.gather(strategy.all_reduce_max(own)).view(-1, 2).amax(0).tolist()
        return sent / max(1, self.run.position.step - self._first_step), int(memory)

    def results(self) -> dict[str, dict[str, Tensor]]:
        """The weights, and their moving average where there is one, by the names of their files. Collective."""
        results, average = {WEIGHTS: self.run.state_dict()}, self._parts.average
        return results if average is None else {**results, AVERAGE: average.module.state_dict()}

    def _end(self) -> TrainingOutcome:
        run, weights = self.run, None
        fingerprint, (bytes_per_step, memory) = run.fingerprint(), self._most_of_a_rank()
        summary = run.strategy.summary()
        if run.options.directory is not None:
            results = self.results()
            if run.is_main:
                classes = known_classes(adopt(self._parts.training_set).dataset)
                metadata = {"step": str(run.position.step)}
                metadata |= {"classes": json.dumps(classes)} if classes else {}
                folder = Path(run.options.directory)
                for name, tensors in results.items():
                    checkpoint.export(folder / name, tensors, metadata=metadata)
                weights = folder / WEIGHTS
        self._logger.close()
        run.close()
        return TrainingOutcome(
            fingerprint=fingerprint,
            is_portable=run.is_portable,
            values=self._values,
            best=self._progress.best,
            best_epoch=self._progress.best_epoch,
            metric=self._progress.metric,
            samples_per_second=self._meter.process.means().get("samples_per_second", 0.0),
            seconds=self._meter.process.seconds,
            weights=weights,
            skipped_steps=run.skipped_steps,
            first_step=self._first_step,
            has_other_data=self._has_other_data or run._agreed_data.found_others,
            level=run.strategy.level,
            bytes_per_step=bytes_per_step,
            peak_memory=memory,
            is_memory_of_device=is_gpu(run.strategy.device),
            remarks=summary,
        )
