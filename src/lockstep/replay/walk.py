"""Goes from the origin to the step on one device, in this process and in its main thread, and looks at the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.errors import CheckpointMismatch, ConfigError
from lockstep.job.assemble import assemble
from lockstep.replay.origin import Origin, alone
from lockstep.replay.report import Compared, Report
from lockstep.run import Run
from lockstep.strategies import StepResult
from lockstep.trainer import Trainer
from lockstep.trainer.gradients import (
    GradientDigest,
    GradientRecord,
    MicroBatchWatch,
    digest_gradients,
    read_records,
    require_separate_micro_batches,
)
from lockstep.world import World


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be recomputed."""

    folder: Path
    """Of the run."""
    step: int
    """Counted from 0 over all epochs."""
    micro_batch: int | None = None
    """None: all of the step."""
    force_context: bool = False
    """Go on with other software, another device or other threads than the run had."""
    pause: Callable[[], object] | None = None
    """Called when the step comes next, before its samples are read: the place for a debugger."""


def replay(asked: Asked, origin: Origin) -> Report:
    """Recomputes a step, or one micro-batch of it, and compares its gradient with the record. Writes nothing.

    Args:
        asked: what.
        origin: of that step, from ``find_origin``.

    Raises:
        ConfigError: there is no such step or micro-batch, or the conditions are not those of the run.
        NonFiniteError: the step, or one on the way, has a loss or a gradient that is NaN or infinite.
    """
    resume = str(origin.checkpoint) if origin.checkpoint is not None else ""
    config = alone(origin.start.job, resume=resume, force_context=asked.force_context)
    trainer = assemble(config, World())
    try:
        run = trainer.run
        _require_context(run, origin, asked.force_context)
        _require_step(trainer, asked, config.training.epochs)
        watcher = trainer.watcher = Comparing(run, asked)
        batch = _walk(trainer, asked, config.training.epochs)
        return _report(asked, origin, watcher, batch)
    finally:
        trainer.run.close()


class Comparing:
    """Stands between the trainer and its handle, and compares gradients with their records.

    Args:
        run: prepared, on one device.
        asked: the step and micro-batch.
    """

    def __init__(self, run: Run, asked: Asked) -> None:
        self._run, self._asked = run, asked
        self.records = read_records(asked.folder)
        self.compared: list[Compared] = []
        """The recorded steps on the way, and the one that was asked for."""
        self.loss = self.norm = float("nan")

    def backward(self, batch: Batch, loss: Callable[..., Any], *, follows_save: bool) -> Tensor:
        """As ``Run.backward``; of the micro-batch alone where one was asked for."""
        step, k = batch.plan.step, self._asked.micro_batch
        record = self.records.get(step)
        if step != self._asked.step and record is None:
            return self._run.backward(batch, loss)
        if step == self._asked.step and k is not None:
            return self._micro_batch(batch, loss, k, record)
        return self._whole(batch, loss, record)

    def _whole(self, batch: Batch, loss: Callable[..., Any], record: GradientRecord | None) -> Tensor:
        recorded = record.micro_batches if record is not None else {}
        watch = MicroBatchWatch(self._run) if recorded else None
        with watch.watching() if watch is not None else nullcontext():
            value = self._run.backward(batch, loss)
        gradient = self._look(float(value))
        own = watch.take() if watch is not None else {}
        self.compared.append(
            Compared(
                step=batch.plan.step,
                gradient=gradient,
                recorded=record.gradient if record is not None else None,
                loss=self.loss.hex(),
                recorded_loss=record.loss if record is not None else self.loss.hex(),
                micro_batches=[
                    k
                    for k, part in recorded.items()
                    if part.digest != GradientDigest.of(own.get(k, {})).digest
                ],
            )
        )
        return value

    def _micro_batch(
        self, batch: Batch, loss: Callable[..., Any], k: int, record: GradientRecord | None
    ) -> Tensor:
        if k >= batch.plan.leaves:
            raise ConfigError(
                f"Step {batch.plan.step} has no micro-batch {k}; its micro-batches are 0 to {batch.plan.leaves - 1}."
            )
        with _one_micro_batch(self._run, k):
            value = self._run.backward(batch, loss)
        gradient = self._look(float(value))
        recorded = record.micro_batches.get(k) if record is not None else None
        self.compared.append(Compared(step=batch.plan.step, gradient=gradient, recorded=recorded))
        return value

    def _look(self, loss: float) -> GradientDigest:
        digests, self.norm = digest_gradients(self._run)
        self.loss = loss
        return GradientDigest.of(digests)


def _report(asked: Asked, origin: Origin, watcher: Comparing, batch: Batch) -> Report:
    plan, k = batch.plan, asked.micro_batch
    parts = plan.indices if k is None else (plan.indices[k],)
    return Report(
        folder=asked.folder,
        origin=origin,
        epoch=plan.epoch,
        position=plan.position,
        leaves=plan.leaves,
        micro_batch=k,
        samples=[index for part in parts for index in part.tolist()],
        loss=watcher.loss,
        norm=watcher.norm,
        compared=watcher.compared[-1],
        earlier=watcher.compared[:-1],
        record=watcher.records.get(asked.step),
    )


@contextmanager
def _one_micro_batch(run: Run, k: int) -> Iterator[None]:
    """Lets a backward pass of the run compute a single micro-batch, whose gradient is not divided by anything."""
    strategy = run.strategy
    original = strategy.backward

    def backward(batch: Batch, compute: Any, *, scale: float, stop: int) -> StepResult:
        total, weight = compute(batch.micro_batches[k])
        (total if scale == 1.0 else total * scale).backward()
        value = total.detach().double()
        yes = torch.ones((), dtype=torch.bool, device=value.device)  # whatever it is, it is reported
        return StepResult(value / weight, value.reshape(1), torch.zeros((), device=value.device), yes)

    strategy.backward = backward  # type: ignore[method-assign]  # that is the place to stand
    try:
        yield
    finally:
        strategy.backward = original  # type: ignore[method-assign]  # as it was


def _walk(trainer: Trainer, asked: Asked, epochs: int) -> Batch:
    """Trains up to the step, and that one too; returns its batch."""
    run, upcoming = trainer.run, trainer.run.position.step
    for _ in run.epochs(epochs):
        batches = iter(trainer.batches())
        while True:
            if upcoming == asked.step and asked.pause is not None:
                asked.pause()
            batch: Batch | None = next(batches, None)
            if batch is None:
                break
            upcoming += 1
            trainer.train_step(batch)
            if batch.plan.step == asked.step:
                return batch
    raise AssertionError("the step was found to be one of the run")


def _require_step(trainer: Trainer, asked: Asked, epochs: int) -> None:
    """Raises ``ConfigError`` where the run has no such step, or its steps no such micro-batch."""
    last, most = epochs * trainer.steps_per_epoch - 1, trainer.run.options.micro_batches - 1
    if asked.step > last:
        raise ConfigError(f"Step {asked.step} does not exist: the steps of the run are 0 to {last}.")
    if asked.micro_batch is not None:
        if not 0 <= asked.micro_batch <= most:
            raise ConfigError(
                f"Micro-batch {asked.micro_batch} does not exist: a step has those from 0 to {most}."
            )
        require_separate_micro_batches(trainer.run)


def _require_context(run: Run, origin: Origin, force_context: bool) -> None:
    """Raises ``CheckpointMismatch`` where the bits depend on something that is not as it was."""
    differences = run.require_prepared().context.differences(origin.start.context)
    if differences and not force_context:
        raise CheckpointMismatch(
            "The run was made under other conditions, so its bits cannot be expected here:\n  "
            + "\n  ".join(differences)
            + "\nRestore these, or compare all the same with --force-context."
        )
