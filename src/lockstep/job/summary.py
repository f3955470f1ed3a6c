"""Says in words and small tables what a job would do: the text of ``--dry-run``, a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.job import JobConfig, ScheduleConfig
from lockstep.core.plan import BatchShape, SamplePlan, StepPlan, share

_PLOT_WIDTH = 60
_PLOT_HEIGHT = 8
_LEVELS = {"ring": "B (tolerance)", "bf16": "B (tolerance)", "powersgd": "C (statistical)"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a job that its data and model tell."""

    samples: int
    """Samples that are trained on."""
    validation_samples: int | None = None
    """Samples that are evaluated on; None: no evaluation."""
    parameters: int = 0
    """Numbers in the model's parameters."""
    batch_norm: bool = False
    """True for a model with BatchNorm, which cannot be computed from one sample."""
    ranks: int | None = None
    """Processes of the run; None where the machine decides."""


def describe(config: JobConfig, facts: Facts, folder: str) -> str:
    """Describes the work of a job as lines of text.

    Args:
        config: the checked job.
        facts: sizes of its data and model.
        folder: where its files would go.
    """
    plan = sample_plan(config, facts)
    return "\n".join(
        [
            *_work(config, facts, plan),
            "",
            *_steps(config, plan),
            "",
            *_shares(config, facts, plan),
            "",
            *_learning_rate(config, plan),
            "",
            *_files(config, folder),
        ]
    )


def sample_plan(config: JobConfig, facts: Facts) -> SamplePlan:
    """The sample plan of the job's training."""
    training = config.training
    return SamplePlan(
        samples=facts.samples,
        shape=BatchShape(global_batch=training.global_batch, micro_batches=training.micro_batches),
        seed=training.seed,
        drop_last=training.drop_last,
        smallest_micro_batch=2 if facts.batch_norm else 1,
    )


def _work(config: JobConfig, facts: Facts, plan: SamplePlan) -> list[str]:
    training, run = config.training, config.run
    ranks = "as many as there are devices" if facts.ranks is None else str(facts.ranks)
    level, workers = _level(config), config.data.loader_processes(run.threads, facts.ranks or 1)
    evaluated = "none" if facts.validation_samples is None else f"{facts.validation_samples:,} samples"
    rows = [
        ("job", config.job),
        ("model", f"{config.model.target}, {facts.parameters:,} parameters"),
        ("data", f"{config.data.train.target}, {facts.samples:,} samples; evaluation: {evaluated}"),
        ("recipe", f"seed {training.seed}, {training.precision}, {config.optimizer.target}"),
        (
            "devices",
            f"{run.devices} ({ranks} ranks of {run.threads} thread(s), {workers} loader workers)",
        ),
        ("strategy", f"{training.strategy}, gradients {training.reduce}, equality level {level}"),
    ]
    if plan.dropped_samples:
        rows.append(("left out", f"{plan.dropped_samples} samples per epoch, of the batch that is not full"))
    return [f"{name:9} {text}" for name, text in rows]


def _level(config: JobConfig) -> str:
    training = config.training
    if training.strategy == "parameter_server" and config.parameter_server.mode == "asynchronous":
        return "C (statistical)"
    exact = "B (tolerance)" if training.sync_batch_norm else "A (bitwise)"
    return _LEVELS.get(training.reduce, exact)


def _steps(config: JobConfig, plan: SamplePlan) -> list[str]:
    epochs, shape = config.training.epochs, plan.shape
    lines = [
        f"{epochs} epochs x {plan.steps_per_epoch} steps = {epochs * plan.steps_per_epoch} optimizer steps; "
        f"a step is {shape.global_batch} samples = "
        f"{shape.micro_batches} micro-batches x {shape.micro_batch_size}."
    ]
    last = plan.step(0, plan.steps_per_epoch - 1)
    if last.samples < shape.global_batch:
        lines.append(
            f"The last step of an epoch has {last.samples} samples: {_tail(last, shape)}; nothing is padded."
        )
    return lines


def _tail(last: StepPlan, shape: BatchShape) -> str:
    full = sum(len(part) == shape.micro_batch_size for part in last.indices)
    parts = [f"{full} full micro-batches"] if full else []
    if full < last.leaves:
        parts.append(f"one of {len(last.indices[-1])}")
    if last.leaves < shape.micro_batches:
        parts.append(f"{shape.micro_batches - last.leaves} empty")
    return ", ".join(parts)


def _shares(config: JobConfig, facts: Facts, plan: SamplePlan) -> list[str]:
    leaves, size = plan.shape.micro_batches, plan.shape.micro_batch_size
    last = plan.step(0, plan.steps_per_epoch - 1)
    choices = [facts.ranks] if facts.ranks else [n for n in (1, 2, 4, 8) if n <= leaves]
    lines = ["ranks  rank  micro-batches k   samples per step  in the last step"]
    for ranks in choices:
        holders, first = _workers(config, ranks)
        for rank in range(ranks):
            if not 0 <= rank - first < holders:
                lines.append(f"{ranks:5}  {rank:4}  none: holds parameters")
                continue
            mine, ending = share(leaves, holders, rank - first), share(last.leaves, holders, rank - first)
            tail = sum(len(last.indices[k]) for k in ending)
            held = f"{mine.start}" if len(mine) == 1 else f"{mine.start} to {mine.stop - 1}"
            lines.append(f"{ranks:5}  {rank:4}  {held:<16}  {len(mine) * size:16}  {tail:16}")
    return lines


def _workers(config: JobConfig, ranks: int) -> tuple[int, int]:
    """The number of ranks that compute micro-batches, and the first of them."""
    servers = config.parameter_server.servers
    if config.training.strategy != "parameter_server" or ranks <= servers:
        return ranks, 0
    return ranks - servers, servers if config.parameter_server.mode == "asynchronous" else 0


def _learning_rate(config: JobConfig, plan: SamplePlan) -> list[str]:
    if not isinstance(config.schedule, ScheduleConfig):
        return [f"learning rate: by {config.schedule.target}, stepped once per optimizer step"]
    schedule = config.schedule.schedule(epochs=config.training.epochs, steps_per_epoch=plan.steps_per_epoch)
    given = config.optimizer.args.get("lr")
    base = float(given) if isinstance(given, int | float) else 1.0
    title = (
        "learning rate" if given is not None else "learning rate, as a factor of the optimizer's own default"
    )
    steps = schedule.steps
    shown = min(_PLOT_WIDTH, steps)
    rates = [base * schedule.factor(position * (steps - 1) // max(1, shown - 1)) for position in range(shown)]
    return [f"{title} over {steps} steps ({config.schedule.kind}):", *plot(rates)]


def plot(values: Sequence[float], height: int = _PLOT_HEIGHT) -> list[str]:
    """A column of ``#`` for each value, from zero to the greatest, with the scale at the left."""
    top = max(values) or 1.0
    lines = []
    for row in range(height, 0, -1):
        marks = "".join("#" if value > 0 and value * height / top > row - 1 else " " for value in values)
        scale = f"{top * row / height:10.3g}"
        lines.append(f"{scale} |{marks}".rstrip())
    return [
        *lines,
        f"{'0':>10} +{'-' * len(values)}",
        f"{'':12}{values[0]:<10.3g}{values[-1]:>{len(values) - 10}.3g}",
    ]


def _files(config: JobConfig, folder: str) -> list[str]:
    checkpoint = config.checkpoint
    moments = [f"every {checkpoint.every_epochs} epoch(s)"] if checkpoint.every_epochs else []
    moments += [f"every {checkpoint.every_steps} steps"] if checkpoint.every_steps else []
    kept = f"{', '.join(moments) or 'at the end'}; the last {checkpoint.keep} and the best are kept"
    lines = [f"run folder   {folder}", f"checkpoints  {folder}/step-*, {kept}"]
    if checkpoint.resume:
        lines.append(f"resumes      {checkpoint.resume}")
    if config.weights.path:
        lines.append(f"weights      {config.weights.path}")
    return lines
