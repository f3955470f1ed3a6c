"""Recomputes a step of a run on one device, in this process and its main thread, and compares the gradient.

find_origin -> assemble the job on one device -> train up to the step -> digest its gradient -> compare with the record
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.errors import CheckpointMismatch, ConfigError
from lockstep.job.assemble import assemble
from lockstep.replay.origin import Origin, single_process_config
from lockstep.replay.report import GradientComparison, ReplayReport
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.strategies import Compute, StepResult
from lockstep.trainer import Trainer
from lockstep.trainer.gradient_record import (
    GradientDigest,
    MicroBatchWatch,
    digest_gradients,
    read_records,
    require_separate_micro_batches,
)


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The step to recompute, and how."""

    folder: Path
    """Run folder."""
    step: int
    """Counted from 0 over all epochs."""
    micro_batch: int | None = None
    """None: the whole step."""
    force_context: bool = False
    """Continue with other software, another device or another number of threads than the run had."""
    pause: Callable[[], object] | None = None
    """Called right before the samples of the step are read: the place for a debugger."""


def replay(request: ReplayRequest, origin: Origin) -> ReplayReport:
    """Recomputes a step, or one micro-batch of it, and compares its gradient with the record. Writes nothing.

    ``origin`` is what ``find_origin`` returned for the step.

    Raises:
        ConfigError: the step or micro-batch does not exist.
        CheckpointMismatch: software, device or threads differ from those of the run.
        NonFiniteError: this step, or one before it, has a loss or a gradient that is NaN or infinite.
    """
    resume = str(origin.checkpoint) if origin.checkpoint is not None else ""
    config = single_process_config(origin.start.job, resume=resume, force_context=request.force_context)
    trainer = assemble(config, World())
    try:
        run = trainer.run
        if not request.force_context:
            _require_context(run, origin)
        _require_step(trainer, request, config.training.epochs)
        comparer = GradientComparer(run, request)
        run.add_callback(comparer)
        plan, k = _train_to(trainer, request, config.training.epochs).plan, request.micro_batch
        parts = plan.indices if k is None else (plan.indices[k],)
        return ReplayReport(
            folder=request.folder,
            origin=origin,
            epoch=plan.epoch,
            position=plan.position,
            leaves=plan.leaves,
            micro_batch=k,
            samples=[index for part in parts for index in part.tolist()],
            loss=comparer.loss,
            norm=comparer.norm,
            compared=comparer.compared[-1],
            earlier=comparer.compared[:-1],
            record=comparer.records.get(request.step),
        )
    finally:
        trainer.run.close()


class GradientComparer(Callback):
    """Compares the gradients of a run with their records.

    Args:
        run: prepared, on one device.
        request: the step and micro-batch.
    """

    def __init__(self, run: Run, request: ReplayRequest) -> None:
        self._run, self._request = run, request
        self.records = read_records(request.folder)
        self.compared: list[GradientComparison] = []
        """The recorded steps before the requested one, then the requested one."""
        self.loss = self.norm = float("nan")
        self._watch: MicroBatchWatch | None = None

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Watches the micro-batches of a whole step whose record has them."""
        record = self.records.get(batch.plan.step)
        if record is not None and record.micro_batches and not self._is_single(batch):
            self._watch = MicroBatchWatch(self._run)
            self._watch.start(batch, scale)

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Compares the gradient of the requested step, and of each earlier step that has a record."""
        step, k = batch.plan.step, self._request.micro_batch
        record = self.records.get(step)
        if record is None and step != self._request.step:
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        digests, self.norm = digest_gradients(self._run)
        self.loss = float(loss)
        found = GradientComparison(step=step, gradient=GradientDigest.of(digests), recorded=None)
        if record is not None and k is not None and self._is_single(batch):
            found = replace(found, recorded=record.micro_batches.get(k))
        elif record is not None:
            own = watch.take() if watch is not None else {}
            mine = {n: GradientDigest.of(own.get(n, {})).digest for n in record.micro_batches}
            found = replace(
                found,
                recorded=record.gradient,
                loss=self.loss.hex(),
                recorded_loss=record.loss,
                micro_batches=[n for n, part in record.micro_batches.items() if part.digest != mine[n]],
            )
        self.compared.append(found)

    def _is_single(self, batch: Batch) -> bool:
        """True where only one micro-batch of the step is computed."""
        return batch.plan.step == self._request.step and self._request.micro_batch is not None


def _backward_of_one(run: Run, batch: Batch, loss: Callable[..., Any], k: int) -> None:
    """Computes the gradient of a single micro-batch, which is not divided by anything."""
    if k >= batch.plan.leaves:
        raise ConfigError(
            f"Step {batch.plan.step} has no micro-batch {k}; its micro-batches are 0 to {batch.plan.leaves - 1}."
        )

    def one_micro_batch(batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        total, weight = compute(batch.micro_batches[k])
        (total if scale == 1.0 else total * scale).backward()  # type: ignore[no-untyped-call]  # torch's stub
        value, weight = total.detach().double(), weight.double()
        finite = torch.ones_like(value).bool()  # NaN is reported as it is
        return StepResult(value / weight, value.reshape(1), weight, torch.zeros_like(value), finite)

    run.backward_by(one_micro_batch, batch, loss)


def _train_to(trainer: Trainer, request: ReplayRequest, epochs: int) -> Batch:
    """Trains up to and including the requested step; returns its batch."""
    run, upcoming = trainer.run, trainer.run.position.step
    for _ in run.epochs(epochs):
        batches = iter(trainer.batches())
        while True:
            if upcoming == request.step and request.pause is not None:
                request.pause()
            batch: Batch | None = next(batches, None)
            if batch is None:
                break
            upcoming, wanted = upcoming + 1, batch.plan.step == request.step
            if wanted and request.micro_batch is not None:
                _backward_of_one(run, batch, trainer.loss, request.micro_batch)
            else:
                trainer.train_step(batch)
            if wanted:
                return batch
    raise AssertionError("_require_step has checked that the run has this step")


def _require_step(trainer: Trainer, request: ReplayRequest, epochs: int) -> None:
    """Raises ``ConfigError`` where the run has no such step, or its steps no such micro-batch."""
    last, most = epochs * trainer.steps_per_epoch - 1, trainer.run.options.micro_batches - 1
    if request.step > last:
        raise ConfigError(f"Step {request.step} does not exist: the steps of the run are 0 to {last}.")
    if request.micro_batch is not None:
        if not 0 <= request.micro_batch <= most:
            raise ConfigError(
                f"Micro-batch {request.micro_batch} does not exist: the micro-batches of a step are 0 to {most}."
            )
        require_separate_micro_batches(trainer.run)


def _require_context(run: Run, origin: Origin) -> None:
    """Raises ``CheckpointMismatch`` where software, device or threads differ from those of the run."""
    differences = run.require_prepared().state.context.differences(origin.start.context)
    if differences:
        raise CheckpointMismatch(
            "The run was trained under other conditions, so its bits cannot be expected here:\n  "
            + "\n  ".join(differences)
            + "\nRestore these conditions, or compare anyway with --force-context."
        )
