"""The settings of a job, typed and frozen, with one sentence each.

A job file has one table per class below; `JobConfig` only collects them. ``[model]``, ``[loss]``,
``[optimizer]`` and ``[data.train]`` are components: ``target`` is an import path, the rest its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.config.checks import (
    CheckedOptions,
    KeyPath,
    at_least,
    between,
    devices,
    file_path,
    more_than,
    one_of,
    plain_name,
    seconds,
    unless_empty,
    workers,
)
from lockstep.config.components import Component
from lockstep.config.options import Recipe, RunOptions, RunSettings
from lockstep.config.reader import read_table, to_table
from lockstep.config.strategy_options import OPTIONS, StrategyOptions
from lockstep.core.lr_schedule import SCHEDULES, Schedule
from lockstep.core.world import usable_cores
from lockstep.errors import ConfigError


def _run_option(name: str, **default: Any) -> Any:
    """A setting that gives a field of ``RunOptions``, with that field's check and, unless another is given, default."""
    option = RunOptions.__dataclass_fields__[name]
    metadata = {**option.metadata, "run_option": name}
    return field(default=default.get("default", option.default), metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(CheckedOptions):
    """Table ``[weights]``: what the model starts from, and which part of it is trained."""

    path: str = field(default="", metadata={"check": file_path})
    """File of weights (.safetensors, or a .pth of tensors only) that the model starts from; empty: the seed's.
    A head of another size is left out, and that is said."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names that are not trained; ``!`` takes names out again: ``["*", "!fc"]``."""
    freeze_statistics: bool = False
    """Keeps a BatchNorm of frozen parameters in evaluation mode, so that its running statistics stay."""


@dataclass(frozen=True, kw_only=True)
class ParameterSettings(CheckedOptions):
    """A table of ``[[parameters.groups]]``: settings of the optimizer for some parameters."""

    names: tuple[str, ...]
    """Patterns of their names; ``!`` takes names out again."""
    lr: float | None = field(default=None, metadata={"check": at_least(0)})
    """Learning rate; none: the optimizer's."""
    weight_decay: float | None = field(default=None, metadata={"check": at_least(0)})
    """Weight decay; none: the optimizer's."""


@dataclass(frozen=True, kw_only=True)
class ParametersConfig(CheckedOptions):
    """Table ``[parameters]``: settings of the optimizer that are not the same for all parameters."""

    decay: str = field(default="all", metadata={"check": one_of("all", "matrices")})
    """The parameters with weight decay: all, or matrices, which leaves out biases and the weights of norms."""
    layer_decay: float | None = field(default=None, metadata={"check": more_than(0)})
    """Factor on the learning rate from each block of the model to the one before it; none: 1."""
    groups: tuple[ParameterSettings, ...] = ()
    """Tables of `names`, patterns of parameter names, with an `lr` or a `weight_decay` of their own; later ones go
    first."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedOptions):
    """Table ``[data]``: the data sets and how they are read."""

    root: str = field(default="", metadata={"check": file_path})
    """Folder (or archive) of the data, usually given by ``--data``; arguments refer to it as ``{data}``."""
    train: Component
    """The data set that is trained on."""
    validation: Component | None = None
    """The data set that is evaluated on; none: no evaluation."""
    collate: Component | None = None
    """Makes a micro-batch of a list of samples; none: torch's `default_collate`."""
    workers: int | str = field(default=2, metadata={"check": workers})
    """Loader processes of each rank, or ``auto``: as many as leave each of its threads a core, 1 to 8. No bit
    changes."""
    prefetch: int = _run_option("prefetch")
    """Steps that each rank reads ahead."""
    timeout: float = _run_option("loader_timeout")
    """Seconds after which a loader that gives nothing is an error."""
    on_bad_sample: str = field(default="error", metadata={"check": one_of("error", "skip")})
    """A training sample that cannot be read: error ends the run; skip lists it and trains on another, up to 1 %."""
    cache: bool | str = field(default=False, metadata={"check": file_path})
    """Decodes photos once, into a folder: true for the user's cache folder, or a path. No bit changes."""

    def loader_processes(self, threads: int, ranks: int) -> int:
        """Loader processes of each rank, if ``ranks`` of ``threads`` threads each share the cores of this process."""
        if isinstance(self.workers, int):
            return self.workers
        return max(1, min(8, usable_cores() // ranks - threads))


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedOptions):
    """Table ``[schedule]``: the learning rate over optimizer steps; with a ``target``, a torch scheduler."""

    kind: str = field(default="constant", metadata={"check": one_of(*SCHEDULES)})
    """Shape: constant, cosine, linear or step."""
    warmup_epochs: float = field(default=0.0, metadata={"check": at_least(0)})
    """Epochs of straight rise from zero at the start; parts of an epoch count."""
    warmup_steps: int = field(default=0, metadata={"check": at_least(0)})
    """The same in optimizer steps; only one of the two."""
    final_factor: float = field(default=0.0, metadata={"check": at_least(0)})
    """Factor on the learning rate at the end of the run, with cosine and linear."""
    step_epochs: float = field(default=30.0, metadata={"check": more_than(0)})
    """Epochs between two drops of step."""
    step_factor: float = field(default=0.1, metadata={"check": more_than(0)})
    """Factor of each drop of step."""

    @property
    def unused(self) -> list[str]:
        """The settings that differ from their defaults and belong to schedules of another kind."""
        of_kinds = {"final_factor": ("cosine", "linear"), "step_epochs": ("step",), "step_factor": ("step",)}
        return [
            name
            for name, kinds in of_kinds.items()
            if self.kind not in kinds and getattr(self, name) != getattr(type(self), name)
        ]

    def schedule(self, *, steps: int, steps_per_epoch: int) -> Schedule:
        """The schedule of a run of this length."""
        return Schedule(
            kind=self.kind,
            steps=steps,
            warmup_steps=self.warmup_steps or round(self.warmup_epochs * steps_per_epoch),
            final_factor=self.final_factor,
            step_every=max(1, round(self.step_epochs * steps_per_epoch)),
            step_factor=self.step_factor,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Recipe):
    """Table ``[training]``: the recipe. The same recipe gives the same bits on any number of devices."""

    epochs: int = field(default=10, metadata={"check": at_least(1)})
    """Times that every sample is trained on."""
    max_steps: int | None = field(default=None, metadata={"check": at_least(1)})
    """Optimizer steps after which the run ends within its epochs; none: after the last epoch."""
    global_batch: int = field(default=128, metadata={"check": at_least(1)})
    """Samples per optimizer step, over all devices together."""
    clip_norm: float | None = field(default=None, metadata={"check": more_than(0)})
    """Greatest norm of the whole gradient; none: not clipped."""
    drop_last: bool = False
    """Leaves out the last batch of an epoch where it is not full."""
    evaluate_every: int = field(default=1, metadata={"check": at_least(1)})
    """Epochs from one evaluation to the next; the last epoch is always evaluated."""
    evaluate_every_steps: int = field(default=0, metadata={"check": at_least(0)})
    """Optimizer steps from one evaluation to the next, beside those of the epochs; 0: none."""
    ema_decay: float | None = field(default=None, metadata={"check": between(0, 1)})
    """Decay of a moving average of the weights in each step, which is evaluated in their place; none: no average."""
    checkpoint_activations: tuple[str, ...] = ()
    """Patterns of the names of modules that are computed again in the backward pass: less memory, the same bits."""
    early_stop: int = field(default=0, metadata={"check": at_least(0)})
    """Evaluations without improvement after which the run ends; 0: never."""
    fingerprint_every: int = field(default=50, metadata={"check": at_least(0)})
    """Optimizer steps between two comparisons of the ranks' parameter bits, which are also made at the end of an epoch
    and before an evaluation; 0: none before the end."""
    gradients_every: int | None = field(default=None, metadata={"check": at_least(0)})
    """Optimizer steps between two records of the gradients' bits, which ``lockstep replay`` compares with; none: as
    ``fingerprint_every``; 0: never."""
    record_micro_batches: bool = False
    """Records the gradient of each micro-batch beside that of the step."""
    audit: bool = False
    """Records every step in a chain of hashes, with which ``lockstep audit`` checks the run."""

    @property
    def record_every(self) -> int:
        """Optimizer steps between two records of the gradients' bits; 0: never."""
        return self.fingerprint_every if self.gradients_every is None else self.gradients_every

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class RunConfig(CheckedOptions):
    """Table ``[run]``: where it runs and where its files go. Nothing but ``threads`` changes a bit."""

    devices: int | str = field(default="auto", metadata={"check": devices})
    """A number of devices, ``auto``, ``cpu``, ``cpu:N``, or the devices themselves as in ``"0,5"``."""
    threads: int = _run_option("threads", default=1)
    """CPU threads that each rank computes with. Part of the recipe: sums on a CPU depend on it."""
    timeout: float = _run_option("timeout")
    """Seconds that a rank waits for another before it gives up."""
    grace: float = field(default=25.0, metadata={"check": seconds(or_none=True)})
    """Seconds that ranks have to save and stop after SIGTERM or SIGUSR1, before they are ended."""
    stall_limit: float = field(default=60.0, metadata={"check": seconds(or_none=True)})
    """Seconds without progress after which a run in which ranks wait for one is explained and ended; 0: never."""
    restarts: int = field(default=3, metadata={"check": at_least(0)})
    """Restarts from the last checkpoint after a lost process, at most; an error of the job itself restarts nothing."""
    restart_world: str = field(default="same", metadata={"check": one_of("same", "remaining", "left")})
    """The devices of a restart: the ``same``, or the ``remaining`` ones, whose ranks were not lost."""
    directory: str = field(default="runs", metadata={"check": file_path})
    """Folder that holds the folders of all runs; a relative one is looked up where the command is given."""
    name: str = field(default="", metadata={"check": unless_empty(plain_name(120))})
    """Name of this run's folder; empty: the job's name and the next free number."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedOptions):
    """Table ``[checkpoint]``: when the state is saved, how much is kept, and what a run resumes from."""

    every_epochs: int = field(default=1, metadata={"check": at_least(0)})
    """Epochs from one checkpoint to the next; 0: at the end of the run only."""
    every_steps: int = field(default=0, metadata={"check": at_least(0)})
    """Optimizer steps from one checkpoint to the next, beside those of the epochs; 0: none."""
    keep: int = _run_option("keep")
    """Checkpoints that are kept, the newest; the best is kept beside them."""
    background: bool = _run_option("save_in_background")
    """Writes a checkpoint from a copy of the state while training continues; false: training waits for the disk."""
    resume: str = _run_option("resume")
    """A run folder or checkpoint to resume from; ``auto``: the job's latest run, if there is one."""
    force_context: bool = _run_option("force_context")
    """Goes on from a checkpoint of another torch, device model or thread count; equality is then level B."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(CheckedOptions):
    """Table ``[log]``: what is written while the job runs."""

    every: int = field(default=10, metadata={"check": at_least(1)})
    """Optimizer steps from one reading of the loss to the next; reading it waits for the device."""
    tensorboard: bool = True
    """Writes TensorBoard events, where tensorboard is installed."""
    json: bool = True
    """Writes one JSON object per line to ``log.jsonl``."""
    csv: bool = False
    """Writes the same as a table to ``log.csv``."""
    wandb: str = ""
    """Project of Weights & Biases that the same is sent to; its package and login are the user's."""
    mlflow: str = ""
    """Experiment of MLflow that the same is sent to; `MLFLOW_TRACKING_URI` says where that is."""
    progress: bool = True
    """Shows a line for each epoch, and a progress bar where the terminal can."""


@dataclass(frozen=True, kw_only=True)
class JobConfig(StrategyOptions):
    """A whole job, checked: nothing in it is left to be looked up or guessed."""

    job: str = field(default="job", metadata={"check": plain_name(100)})
    """Name of the job; that of its file, if the file does not say."""
    code: tuple[str, ...] = ()
    """Folders of the user's own modules, searched first; after them the job file's and the current one are."""
    model: Component
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    data: DataConfig
    loss: Component = field(default_factory=lambda: Component(target="torch.nn:CrossEntropyLoss"))
    optimizer: Component
    parameters: ParametersConfig = field(default_factory=ParametersConfig)
    schedule: ScheduleConfig | Component = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: Mapping[str, Component] = field(default_factory=dict)
    callbacks: tuple[Component, ...] = ()

    @property
    def settings(self) -> RunSettings:
        """The settings that `lockstep.init` takes too, for the rules."""
        return RunSettings(**self._settings())

    def run_options(self, directory: Path | str | None, profile: str = "") -> RunOptions:
        """The options of the job's run.

        Args:
            directory: the run folder.
            profile: the steps that are written into a timeline, as FIRST:COUNT; none by default.
        """
        given = {
            setting.metadata["run_option"]: getattr(section, setting.name)
            for section in (self.data, self.run, self.checkpoint)
            for setting in fields(section)
            if "run_option" in setting.metadata
        }
        return RunOptions(**self._settings(), **given, directory=directory, profile=profile)

    def _settings(self) -> dict[str, Any]:
        shared = {option.name: getattr(self.training, option.name) for option in fields(Recipe)}
        return shared | {name: getattr(self, name) for name in OPTIONS}

    def components(self) -> list[tuple[KeyPath, Component]]:
        """Every component that the job has, with the key path of its table."""
        parts: list[tuple[KeyPath, Any]] = [
            (("model",), self.model),
            (("data", "train"), self.data.train),
            (("data", "validation"), self.data.validation),
            (("data", "collate"), self.data.collate),
            (("loss",), self.loss),
            (("optimizer",), self.optimizer),
            (("schedule",), self.schedule),
            *((("metrics", name), part) for name, part in self.metrics.items()),
            *((("callbacks", number), part) for number, part in enumerate(self.callbacks)),
        ]
        return [(path, part) for path, part in parts if isinstance(part, Component)]

    def to_json(self) -> str:
        """The job as JSON in the form of a job file; `from_json` gives an equal job."""
        return json.dumps(to_table(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> JobConfig:
        """Reads what `to_json` wrote; anything else is a ``ConfigError``."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"A job was expected as JSON and cannot be read: {error}.") from error
        config, problems = read_table(cls, table)
        if config is None:
            raise ConfigError("The job is not valid: " + " ".join(problem.text for problem in problems))
        return config
