"""Recomputes a step of a run on one device, in this process and its main thread, and compares the gradient.

find_origin -> assemble the job on one device -> train up to the step -> digest its gradient -> compare with the record

The origin is the nearest checkpoint at or before the step, or the start of the run:

starts        0 ................................ 24 (resumed)
checkpoints              12                      24        36
step 30                                          |-> 30               from step-00000024
step 9        |--> 9                                                  from the seed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.folder import step_of
from lockstep.config.job import CheckpointConfig, JobConfig, LogConfig, RunConfig
from lockstep.config.strategy_options import OPTIONS
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.job.assemble import assemble
from lockstep.job.run_folder import Start, decides_result, read_starts, settings_that_differ
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.strategies import Compute, StepResult
from lockstep.strategies.gradients import run_backward
from lockstep.text import labelled, numbered, plural, shorten
from lockstep.trainer import Trainer
from lockstep.trainer.gradient_record import (
    GradientDigest,
    GradientRecord,
    MicroBatchWatch,
    digest_gradients,
    read_records,
    require_separate_micro_batches,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The state from which a replay starts."""

    start: Start
    """The start of the run to which the step belongs."""
    step: int
    """The first step that is recomputed."""
    checkpoint: Path | None
    """Holds the state; None where it follows from the seed."""

    @property
    def label(self) -> str:
        """As in ``step-00000012``."""
        return self.checkpoint.name if self.checkpoint is not None else "the beginning of the run"


def find_origin(folder: Path, step: int) -> Origin:
    """The origin for a step of the run in ``folder``; steps are counted from 0 over all epochs.

    Raises:
        ConfigError: the run does not exist, the step is not part of it, or no state is left to start from.
    """
    starts = read_starts(folder)
    if step < 0:
        raise ConfigError(f"Step {step} does not exist; steps are counted from 0.")
    if step < starts[0].step:
        raise ConfigError(
            f"Step {step} is not part of the run in '{folder}', which resumed from step {starts[0].step} of another "
            "run. Replay that run instead."
        )
    start = [each for each in starts if each.step <= step][-1]
    path, first = _newest(folder, step) or _beginning(folder, starts[0], step)
    before = [each for each in starts if each.step <= first][-1]
    for each in (each for each in starts if first < each.step <= start.step):
        pair = {str(n): replace(one, job=single_process_config(one.job)) for n, one in enumerate((before, each))}
        is_other = any(decides_result(name) for name, *_ in settings_that_differ(pair)[1:])
        if is_other or each.job.code != before.job.code or dict(each.context) != dict(before.context):
            raise ConfigError(
                f"Step {step} cannot be recomputed: the run was resumed with other settings at step {each.step}, that "
                f"checkpoint no longer exists, and the nearest one is of step {first}. Keep more checkpoints with "
                "checkpoint.keep."
            )
    return Origin(start=start, step=first, checkpoint=path)


def single_process_config(job: JobConfig, *, resume: str = "", force_context: bool = False) -> JobConfig:
    """The recipe of a job on one device and in one process, which writes nothing and starts from ``resume``."""
    return replace(
        job,
        **{name: default() for name, default in OPTIONS.items() if name != "tensor"},  # whose shards bits depend on
        data=replace(job.data, validation=None, workers=0),
        metrics={},
        training=replace(
            job.training,
            strategy="single",
            mesh="",
            fingerprint_every=0,
            gradients_every=0,
            record_micro_batches=False,
            audit=False,
        ),
        run=RunConfig(threads=job.run.threads),
        checkpoint=CheckpointConfig(resume=resume, force_context=force_context),
        log=LogConfig(tensorboard=False, json=False, progress=False),
    )


def trainer_at(origin: Origin, *, force_context: bool = False) -> Trainer:
    """A trainer on one device with the state of ``origin``, whose data may differ from the recorded ones."""
    resume = str(origin.checkpoint) if origin.checkpoint is not None else ""
    trainer = assemble(
        single_process_config(origin.start.job, resume=resume, force_context=force_context), World.alone()
    )
    trainer.run._agreed_data.refuses_others = False
    return trainer


def _newest(folder: Path, step: int) -> tuple[Path, int] | None:
    """The newest sound checkpoint at or before a step, and its step."""
    for path in reversed(checkpoint.committed(folder)):
        found = step_of(path)
        if found is None or found[0] > step:
            continue
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            logger.warning("Checkpoint skipped: %s", error)
        else:
            return path, found[0]
    return None


def _beginning(folder: Path, first: Start, step: int) -> tuple[Path | None, int]:
    """The initial state of the run: None for the seed, or a checkpoint of another run."""
    resume = first.job.checkpoint.resume
    if first.step == 0:
        return None, 0
    if resume != "auto" and Path(resume).is_dir():
        return Path(resume), first.step
    steps = shorten(found[0] for path in checkpoint.committed(folder) if (found := step_of(path)))
    raise ConfigError(
        f"'{folder}' has no checkpoint at or before step {step} (its steps: {steps or 'none'}), and the checkpoint "
        f"from which the run started at step {first.step} no longer exists. Choose a later step, and keep more "
        "checkpoints with checkpoint.keep."
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
    trainer = trainer_at(origin, force_context=request.force_context)
    training = origin.start.job.training
    with closing(trainer.run):
        if not request.force_context:
            require_context(trainer.run, origin)
        _require_step(trainer, request, training.steps(trainer.steps_per_epoch))
        comparer = GradientComparer(trainer.run, request)
        trainer.run.add_callback(comparer)
        plan, k = _train_to(trainer, request, training.epochs).plan, request.micro_batch
        parts = range(plan.leaves) if k is None else (k,)
        return ReplayReport(
            folder=request.folder,
            origin=origin,
            epoch=plan.epoch,
            position=plan.position,
            leaves=plan.leaves,
            micro_batch=k,
            samples=[number for part in parts for number in plan.numbers(part)],
            loss=comparer.loss,
            norm=comparer.norm,
            compared=comparer.compared[-1],
            earlier=comparer.compared[:-1],
            record=comparer.records.get(request.step),
            is_missing=_is_missing(request.step, comparer.records, training.record_every),
        )


def _is_missing(step: int, records: Collection[int], every: int) -> bool:
    return step not in records and step < max(records, default=-1) and every > 0 and step % every == 0


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
        run_backward(total, scale)
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


def _require_step(trainer: Trainer, request: ReplayRequest, steps: int) -> None:
    """Raises ``ConfigError`` if a run of ``steps`` steps lacks the requested step, or the step the micro-batch."""
    last, most = steps - 1, trainer.run.options.micro_batches - 1
    if request.step > last:
        raise ConfigError(f"Step {request.step} does not exist: the steps of the run are 0 to {last}.")
    if request.micro_batch is not None:
        if not 0 <= request.micro_batch <= most:
            raise ConfigError(
                f"Micro-batch {request.micro_batch} does not exist: the micro-batches of a step are 0 to {most}."
            )
        require_separate_micro_batches(trainer.run)
        if trainer.run.options.sync_batch_norm:
            raise ConfigError(
                "With training.sync_batch_norm the statistics of a micro-batch are those of its whole step, so none is "
                "computed alone. Leave --micro-batch out: the step is computed, and with "
                "training.record_micro_batches=true each of its micro-batches is compared."
            )


def require_context(run: Run, origin: Origin) -> None:
    """Raises ``CheckpointMismatch`` where software, device or threads differ from those of the run."""
    differences = run.require_prepared().state.context.differences(origin.start.context)
    if differences:
        raise CheckpointMismatch(
            "The run was trained under other conditions, so its bits cannot be expected here:\n  "
            + "\n  ".join(differences)
            + "\nRestore these conditions, or compare anyway with --force-context."
        )


_MOST_NAMES = 5
_MOST_SAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class GradientComparison:
    """A recomputed gradient and its record."""

    step: int
    gradient: GradientDigest
    recorded: GradientDigest | None
    loss: str = ""
    """Recomputed, as ``float.hex``; empty where no loss was recorded."""
    recorded_loss: str = ""
    micro_batches: Sequence[int] = ()
    """Numbers of those whose own gradients differ, where they were recorded."""

    @property
    def differs(self) -> bool:
        """True where the record has another gradient, of the step or of a micro-batch, or another loss."""
        if self.recorded is None:
            return False
        return self.recorded != self.gradient or bool(self.micro_batches) or self.loss != self.recorded_loss


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of a replay."""

    folder: Path
    origin: Origin
    epoch: int
    position: int
    """Step within the epoch."""
    leaves: int
    """Micro-batches of the step."""
    micro_batch: int | None
    samples: Sequence[int]
    """Indices in the data set of all samples that were computed."""
    loss: float
    """Mean over those samples."""
    norm: float
    """Of the gradient: of the mean loss for a whole step, of the sum of the losses for a micro-batch."""
    compared: GradientComparison
    earlier: Sequence[GradientComparison]
    """The recorded steps before it that were recomputed too."""
    record: GradientRecord | None
    """Of the step; None where there is none."""
    is_missing: bool = False
    """True where there is none though the run has recorded the step, and later ones are there."""

    @property
    def differs(self) -> bool:
        """True where the record of this step, or of one before it, differs."""
        return any(each.differs for each in (*self.earlier, self.compared))


def describe(report: ReplayReport) -> str:
    """The report for the terminal, one fact a line; the last line says whether the bits equal the record."""
    origin, start, step = report.origin, report.origin.start, report.compared.step
    steps, k = step - origin.step, report.micro_batch
    before = f"{plural(steps, 'step')} before" if steps else "right before it"
    part = "" if k is None else f", micro-batch {k} of {numbered('rank', start.holders(k, report.leaves))}"
    of_sum = "" if k is None else " (of the sum of the losses, not of their mean)"
    counts_nothing = math.isnan(report.loss) and report.norm == 0
    rows = [
        ("run", f"{report.folder}, trained with {start.strategy} on {start.ranks}"),
        ("step", f"{step}{part} (step {report.position} of epoch {report.epoch + 1})"),
        ("from", f"{origin.label}, {before}"),
        ("samples", shorten(report.samples, _MOST_SAMPLES)),
        ("loss", "none: no target counts" if counts_nothing else f"{report.loss:.9g}"),
        ("norm", f"{report.norm:.9g}{of_sum}"),
        ("digest", report.compared.gradient.digest),
        ("record", _verdict(report)),
    ]
    return "\n".join(labelled(rows))


def _verdict(report: ReplayReport) -> str:
    earlier = next((each for each in report.earlier if each.differs), None)
    if earlier is not None:
        return f"differs already at step {earlier.step}: {_differences(earlier)}"
    if report.compared.recorded is None:
        return _why_absent(report)
    if report.compared.differs:
        return f"differs: {_differences(report.compared)}"
    return "matches: the gradient has the bits that were recorded"


def _differences(compared: GradientComparison) -> str:
    assert compared.recorded is not None
    mine, recorded = compared.gradient, compared.recorded
    found = mine.difference(recorded, _MOST_NAMES)
    if not found and mine.digest != recorded.digest:
        found = "the digest of the whole gradient"
    text = found or "the gradient of the step has the recorded bits"
    if compared.micro_batches:
        also = ", " if found else ", but others are recorded "
        text += f"{also}in micro-batches {shorten(compared.micro_batches, _MOST_SAMPLES)}"
    if compared.loss == compared.recorded_loss:
        return text
    here, there = (float.fromhex(each) for each in (compared.loss, compared.recorded_loss))
    return f"{text}; {'so does the loss' if found else 'the loss differs'}, {here:.9g} here and {there:.9g} there"


def _why_absent(report: ReplayReport) -> str:
    start = report.origin.start
    if start.level != "A":
        return (
            f"was not recorded: strategy {start.strategy} promises level {start.level} with these settings, "
            "so its bits may differ from those of one device"
        )
    if report.is_missing:
        return "is missing: gradients.jsonl has later steps, and no line of this one that can be read"
    setting = "gradients_every=1" if report.record is None else "record_micro_batches=true"
    text = f"was not recorded; train with --set training.{setting} to record it"
    if report.earlier:
        text += f" (step {report.earlier[-1].step}, the last recorded one before it, matches)"
    return text
