"""Says in words and small tables what a job would do (``--dry-run``), and what its run has done (its last lines)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.job import JobConfig, ScheduleConfig
from lockstep.config.rules import planned_shares
from lockstep.config.strategy_options import REDUCERS, Level
from lockstep.core.plan import BatchShape, SamplePlan, Share, StepPlan
from lockstep.text import format_bytes, labelled, percent, plural, samples_per_second, shorten
from lockstep.trainer import TrainingOutcome

_PLOT_WIDTH = 60
_PLOT_HEIGHT = 8
_MOST_NUMBERS = 4


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a job that its data and model tell."""

    plan: SamplePlan
    """Of the training."""
    validation_samples: int | None = None
    """Samples that are evaluated on; None: no evaluation."""
    parameters: int = 0
    """Numbers in the model's parameters."""
    devices: int
    """Devices of all hosts together."""
    hosts: int = 1


def describe(config: JobConfig, facts: Facts, folder: str) -> str:
    """Describes the work of a checked job, whose files would go to ``folder``, as lines of text."""
    plan, shares = facts.plan, planned_shares(config.settings, facts.devices)
    return "\n".join(
        [
            *_work(config, facts, len(shares)),
            "",
            *_steps(config, plan),
            "",
            *_shares(plan, shares),
            "",
            *_learning_rate(config, plan),
            "",
            *_files(config, folder),
        ]
    )


def _work(config: JobConfig, facts: Facts, ranks: int) -> list[str]:
    training, run, plan = config.training, config.run, facts.plan
    level, workers = _level(config), config.data.loader_processes(run.threads, ranks // facts.hosts)
    evaluated = "none" if facts.validation_samples is None else f"{facts.validation_samples:,} samples"
    rows = [
        ("job", config.job),
        ("model", f"{config.model.target}, {facts.parameters:,} parameters"),
        ("data", f"{config.data.train.target}, {plan.samples:,} samples; evaluation: {evaluated}"),
        ("recipe", f"seed {training.seed}, {training.precision}, {config.optimizer.target}"),
        (
            "devices",
            f"{run.devices} ({plural(ranks, 'rank')} of {plural(run.threads, 'thread')}, "
            f"{plural(workers, 'loader worker')})",
        ),
        ("strategy", f"{training.strategy}, gradients {training.reduce}, equality level {level}"),
    ]
    if plan.dropped_samples:
        why = "of the batch that is not full" if plan.drop_last else "too few for BatchNorm in a micro-batch"
        rows.append(("left out", f"{plural(plan.dropped_samples, 'sample')} per epoch, {why}"))
    return labelled(rows)


def _level(config: JobConfig) -> str:
    training, level = config.training, REDUCERS[config.training.reduce]
    is_asynchronous = training.strategy == "parameter_server" and config.parameter_server.mode == "asynchronous"
    splits_layers = training.strategy == "tensor" or "tensor" in training.mesh
    rounds = training.strategy == "fsdp" and (config.fsdp.cpu_offload or config.fsdp.mixed_precision)
    if is_asynchronous or not training.deterministic:
        level = Level.STATISTICAL
    elif level is Level.BITWISE and (rounds or (splits_layers and not config.tensor.shards)):
        level = Level.TOLERANCE
    why = "" if is_asynchronous or training.deterministic else " on CUDA: deterministic = false"
    return f"{level.value} ({level.name.lower()}){why}"


def _steps(config: JobConfig, plan: SamplePlan) -> list[str]:
    epochs, limit, shape = config.training.epochs, config.training.max_steps, plan.shape
    every = plural(epochs * plan.steps_per_epoch, "optimizer step")
    made = "" if limit is None else f", of which max_steps makes {limit:,}"
    lines = [
        f"{plural(epochs, 'epoch')} x {plural(plan.steps_per_epoch, 'step')} = {every}{made}; a step is "
        f"{plural(shape.global_batch, 'sample')} = {plural(shape.micro_batches, 'micro-batch')} x "
        f"{shape.micro_batch_size}."
    ]
    last = plan.step(0, plan.steps_per_epoch - 1)
    if last.samples < shape.global_batch:
        lines.append(
            f"The last step of an epoch has {plural(last.samples, 'sample')}: {_tail(last, shape)}; nothing is padded."
        )
    return lines


def _tail(last: StepPlan, shape: BatchShape) -> str:
    full = sum(len(part) == shape.micro_batch_size for part in last.indices)
    parts = [plural(full, "full micro-batch")] if full else []
    if full < last.leaves:
        parts.append(f"one of {len(last.indices[-1])}")
    if last.leaves < shape.micro_batches:
        parts.append(f"{shape.micro_batches - last.leaves} empty")
    return ", ".join(parts)


def _shares(plan: SamplePlan, shares: Sequence[Share]) -> list[str]:
    last = plan.step(0, plan.steps_per_epoch - 1)
    full = [plan.shape.micro_batch_size] * plan.shape.micro_batches
    lines = ["ranks  rank  micro-batches k   samples per step  in the last step"]
    for rank, share in enumerate(shares):
        lead = f"{len(shares):5}  {rank:4}"
        if share.holder is None:
            lines.append(f"{lead}  none: holds parameters")
            continue
        samples, ending = (
            sum(sizes[k] for k in share.of(len(sizes)) if k < len(sizes))
            for sizes in (full, [len(part) for part in last.indices])
        )
        mine = [k for k in share.of(len(full)) if k < len(full)]
        consecutive = len(mine) > 1 and mine[-1] - mine[0] < len(mine)
        held = f"{mine[0]} to {mine[-1]}" if consecutive else shorten(mine, _MOST_NUMBERS)
        lines.append(f"{lead}  {held:<16}  {samples:16}  {ending:16}")
    return lines


def _learning_rate(config: JobConfig, plan: SamplePlan) -> list[str]:
    if not isinstance(config.schedule, ScheduleConfig):
        return [f"learning rate: by {config.schedule.target}, stepped once per optimizer step"]
    steps = config.training.steps(plan.steps_per_epoch)
    schedule = config.schedule.schedule(steps=steps, steps_per_epoch=plan.steps_per_epoch)
    given = config.optimizer.args.get("lr")
    base = float(given) if isinstance(given, int | float) else 1.0
    title = "learning rate" if given is not None else "learning rate, as a factor of the optimizer's own default"
    shown = min(_PLOT_WIDTH, steps)
    rates = [base * schedule.factor(position * (steps - 1) // max(1, shown - 1)) for position in range(shown)]
    return [f"{title} over {plural(steps, 'step')} ({config.schedule.kind}):", *plot(rates)]


def plot(values: Sequence[float], height: int = _PLOT_HEIGHT) -> list[str]:
    """A column of ``#`` for each value, to the nearest mark of the scale at the left; one at least above zero."""
    top = max(values) or 1.0
    lines = []
    for row in range(height, 0, -1):
        least = row - 0.5 if row > 1 else 0.0
        marks = "".join("#" if value * height / top > least else " " for value in values)
        scale = f"{top * row / height:10.3g}"
        lines.append(f"{scale} |{marks}".rstrip())
    return [
        *lines,
        f"{'0':>10} +{'-' * len(values)}",
        f"{'':12}{values[0]:<10.3g}{values[-1]:>{len(values) - 10}.3g}",
    ]


def _files(config: JobConfig, folder: str) -> list[str]:
    checkpoint = config.checkpoint
    moments = [f"every {plural(checkpoint.every_epochs, 'epoch')}"] if checkpoint.every_epochs else []
    moments += [f"every {plural(checkpoint.every_steps, 'step')}"] if checkpoint.every_steps else []
    kept = f"{', '.join(moments) or 'at the end'}; the last {checkpoint.keep} and the best are kept"
    lines = [f"run folder   {folder}", f"checkpoints  {folder}/step-*, {kept}"]
    if checkpoint.resume:
        lines.append(f"resumes      {checkpoint.resume}")
    if config.weights.path:
        lines.append(f"weights      {config.weights.path}")
    return lines


def describe_outcome(outcome: TrainingOutcome, proof: str) -> str:
    """The last lines of a run, for people and for scripts.

    Args:
        outcome: what the run came to.
        proof: the command that ends in the same fingerprint on other devices; empty where none is promised to.
    """
    rows = []
    if outcome.metric in outcome.values:
        given = outcome.values[outcome.metric]
        is_share = outcome.metric.endswith("accuracy") and max(given, outcome.best or given) <= 1
        form = percent if is_share else "{:.6g}".format
        best = ""
        if outcome.best is not None and not math.isnan(outcome.best):
            best = f" (best {form(outcome.best)}, epoch {outcome.best_epoch + 1})"
        # In an epoch's line, the entry of that name is of the training.
        name = outcome.metric.removeprefix("validation_")
        rows.append((name, f"{form(given)} on the validation set{best}"))
    if outcome.seconds:
        speed = f"{samples_per_second(outcome.samples_per_second)}, {outcome.seconds:.1f} s of training"
        since = f" since step {outcome.first_step:,}" if outcome.first_step else ""
        rows.append(("speed", speed + since))
    if outcome.bytes_per_step:
        rows.append(("sent", f"at most {format_bytes(outcome.bytes_per_step)} per step and rank"))
    if outcome.peak_memory:
        where = "allocated on a device" if outcome.is_memory_of_device else "resident in a process"
        rows.append(("memory", f"at most {format_bytes(outcome.peak_memory)} {where}"))
    rows += outcome.remarks.items()
    if outcome.skipped_steps:
        rows.append(("skipped", f"{plural(outcome.skipped_steps, 'step')} whose scaled gradients overflowed"))
    if outcome.weights is not None:
        path, here = outcome.weights, Path.cwd()
        rows.append(("weights", str(path.relative_to(here) if path.is_relative_to(here) else path)))
    where = "   (on every x86-64 CPU with AVX2)" if outcome.is_portable and outcome.level is Level.BITWISE else ""
    rows.append(("fingerprint", outcome.fingerprint + where))
    if proof:
        rows.append(("prove it", f"{proof}   (ends in the same fingerprint)"))
    return "\n".join(f"{name:12} {text}" for name, text in rows)
