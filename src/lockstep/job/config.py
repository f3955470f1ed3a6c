"""What a job is: every setting, typed and frozen, with one sentence each.

A job file has one table per class below; `JobConfig` only collects them. ``[model]``, ``[loss]``,
``[optimizer]`` and ``[data.train]`` are components: ``target`` is an import path, the rest its arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from lockstep.checks import Checked, at_least, devices, more_than, one_of, plain_name
from lockstep.errors import ConfigError
from lockstep.job.component import Component
from lockstep.job.config_reader import read_table, to_table
from lockstep.schedules import SCHEDULES, Schedule
from lockstep.strategy_options import (
    STRATEGIES,
    DpOptions,
    FsdpOptions,
    LayersOptions,
    ParameterServerOptions,
    PipelineOptions,
    TensorOptions,
)

REDUCERS = ("ordered", "ring", "bf16", "powersgd")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Checked):
    """Table ``[weights]``: what the model starts from, and which part of it is trained."""

    path: str = ""
    """File of weights (.safetensors, or a .pth of tensors only) that the model starts from; empty: the seed's.
    A head of another size is left out, and that is said."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names that are not trained; ``!`` takes names out again: ``["*", "!fc"]``."""
    freeze_statistics: bool = False
    """Keeps a BatchNorm of frozen parameters in evaluation mode, so that its running statistics stay."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """Table ``[data]``: the data sets and how they are read."""

    root: str = ""
    """Folder (or archive) of the data, usually given by ``--data``; arguments refer to it as ``{data}``."""
    train: Component
    """The data set that is trained on."""
    validation: Component | None = None
    """The data set that is evaluated on; none: no evaluation."""
    workers: int = field(default=2, metadata={"check": at_least(0)})
    """Loader processes of each rank; they never change a bit."""
    prefetch: int = field(default=2, metadata={"check": at_least(1)})
    """Steps that each rank reads ahead."""
    timeout: float = field(default=120.0, metadata={"check": more_than(0)})
    """Seconds after which a loader that gives nothing is an error."""
    on_bad_sample: str = field(default="error", metadata={"check": one_of("error", "skip")})
    """A training sample that cannot be read: error ends the run; skip lists it and trains on another, up to 1 %."""
    cache: bool | str = False
    """Decodes photos once, into a folder: true for the user's cache folder, or a path. No bit changes."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Checked):
    """Table ``[schedule]``: the learning rate over optimizer steps; with a ``target``, a torch scheduler."""

    kind: str = field(default="constant", metadata={"check": one_of(*SCHEDULES)})
    """Shape: constant, cosine, linear or step."""
    warmup_epochs: float = field(default=0.0, metadata={"check": at_least(0)})
    """Epochs of straight rise from zero at the start; parts of an epoch count."""
    warmup_steps: int = field(default=0, metadata={"check": at_least(0)})
    """The same in optimizer steps; only one of the two."""
    final_factor: float = field(default=0.0, metadata={"check": at_least(0)})
    """What cosine and linear multiply the learning rate by at the end of the run."""
    step_epochs: float = field(default=30.0, metadata={"check": more_than(0)})
    """Epochs between two drops of step."""
    step_factor: float = field(default=0.1, metadata={"check": more_than(0)})
    """What each drop of step multiplies the learning rate by."""

    def schedule(self, *, epochs: int, steps_per_epoch: int) -> Schedule:
        """The schedule of a run of this length."""
        return Schedule(
            kind=self.kind,
            steps=epochs * steps_per_epoch,
            warmup_steps=self.warmup_steps or round(self.warmup_epochs * steps_per_epoch),
            final_factor=self.final_factor,
            step_every=max(1, round(self.step_epochs * steps_per_epoch)),
            step_factor=self.step_factor,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """Table ``[training]``: the recipe. The same recipe gives the same bits on any number of devices."""

    epochs: int = field(default=10, metadata={"check": at_least(1)})
    """Times that every sample is trained on."""
    global_batch: int = field(default=128, metadata={"check": at_least(1)})
    """Samples per optimizer step, over all devices together."""
    micro_batches: int = field(default=8, metadata={"check": at_least(1)})
    """K: how many parts the global batch is computed in; at most K devices can share it."""
    evaluation_batch: int | None = field(default=None, metadata={"check": at_least(1)})
    """Samples per forward pass of the evaluation; none: as many as in a training micro-batch."""
    seed: int = field(default=0, metadata={"check": at_least(0)})
    """Decides the first weights, the order of the samples, augmentation, dropout and a split by seed."""
    strategy: str = field(default="ddp", metadata={"check": one_of(*STRATEGIES)})
    """How the work is laid out: single (one device), ddp (a process and a replica per device), ..."""
    mesh: str = ""
    """The axes of strategy hybrid, the outermost first: ``data=2,pipeline=2``."""
    reduce: str = field(default="ordered", metadata={"check": one_of(*REDUCERS)})
    """How gradients are summed: ordered (level A, bitwise), ring (B, the backend's all-reduce), bf16 (B, rounded to
    half the bytes) or powersgd (C, compressed)."""
    powersgd_rank: int = field(default=4, metadata={"check": at_least(1)})
    """Columns of the two factors that powersgd sends instead of a gradient matrix."""
    precision: str = field(default="fp32", metadata={"check": one_of(*PRECISIONS)})
    """Number format of the computation: fp32, tf32, bf16, or fp16 with loss scaling."""
    channels_last: bool = False
    """Keeps images and convolution weights in channels-last order."""
    compile: bool = False
    """Compiles the model with torch.compile; another recipe than the same job without."""
    sync_batch_norm: bool = False
    """Computes BatchNorm over the whole global batch (level B); strategies single and ddp have it."""
    running_buffers: tuple[str, ...] = ()
    """Patterns of buffers, beside BatchNorm's, that the forward pass changes and that are to be averaged."""
    clip_norm: float | None = field(default=None, metadata={"check": more_than(0)})
    """Greatest norm of the whole gradient; none: not clipped."""
    drop_last: bool = False
    """Leaves out the last batch of an epoch where it is not full."""
    evaluate_every: int = field(default=1, metadata={"check": at_least(1)})
    """Epochs from one evaluation to the next; the last epoch is always evaluated."""
    early_stop: int = field(default=0, metadata={"check": at_least(0)})
    """Evaluations without improvement after which the run ends; 0: never."""
    fingerprint_every: int = field(default=50, metadata={"check": at_least(0)})
    """Optimizer steps between two comparisons of the ranks' parameter bits; 0: none before the end."""
    gradients_every: int | None = field(default=None, metadata={"check": at_least(0)})
    """Optimizer steps between two records of the gradients' bits, which ``lockstep replay`` compares with; none: as
    ``fingerprint_every``; 0: never."""
    record_micro_batches: bool = False
    """Records the gradient of each micro-batch beside that of the step."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """Table ``[run]``: where it runs and where its files go. Nothing but ``threads`` changes a bit."""

    devices: int | str = field(default="auto", metadata={"check": devices})
    """A number of devices, ``auto``, ``cpu``, ``cpu:N``, or the devices themselves as in ``"0,5"``."""
    threads: int = field(default=1, metadata={"check": at_least(1)})
    """CPU threads that each rank computes with. Part of the recipe: sums on a CPU depend on it."""
    timeout: float = field(default=600.0, metadata={"check": more_than(0)})
    """Seconds that a rank waits for another before it gives up."""
    grace: float = field(default=25.0, metadata={"check": at_least(0)})
    """Seconds that ranks have to save and stop after SIGTERM or SIGUSR1, before they are ended."""
    stall_limit: float = field(default=60.0, metadata={"check": at_least(0)})
    """Seconds without progress after which a run in which ranks wait for one is explained and ended; 0: never."""
    restarts: int = field(default=3, metadata={"check": at_least(0)})
    """How often a run that lost a process is started again from its last checkpoint; not after an error of its own."""
    restart_world: str = field(default="same", metadata={"check": one_of("same", "left")})
    """On what it is started again: ``same`` devices, or those ``left`` whose ranks were not lost."""
    directory: str = "runs"
    """Folder that holds the folders of all runs; a relative one is looked up where the command is given."""
    name: str = field(default="", metadata={"check": plain_name})
    """Name of this run's folder; empty: the job's name and the next free number."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """Table ``[checkpoint]``: when the state is saved, how much is kept, and what a run goes on from."""

    every_epochs: int = field(default=1, metadata={"check": at_least(0)})
    """Epochs from one checkpoint to the next; 0: at the end of the run only."""
    every_steps: int = field(default=0, metadata={"check": at_least(0)})
    """Optimizer steps from one checkpoint to the next, beside those of the epochs; 0: none."""
    keep: int = field(default=3, metadata={"check": at_least(1)})
    """Checkpoints that are kept, the newest; the best is kept beside them."""
    background: bool = True
    """Writes a checkpoint from a copy of the state while training goes on; false: training waits for the disk."""
    resume: str = ""
    """A run folder or checkpoint to go on from; ``auto``: the job's latest run, if there is one."""
    force_context: bool = False
    """Goes on from a checkpoint of another torch, device model or thread count; equality is then level B."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Checked):
    """Table ``[log]``: what is written while the job runs."""

    every: int = field(default=10, metadata={"check": at_least(1)})
    """Optimizer steps from one reading of the loss to the next; reading it waits for the device."""
    tensorboard: bool = True
    """Writes TensorBoard events, where tensorboard is installed."""
    json: bool = True
    """Writes one JSON object per line to ``log.jsonl``."""
    progress: bool = True
    """Shows a progress bar where the terminal can."""


def _cross_entropy() -> Component:
    return Component(target="torch.nn:CrossEntropyLoss")


@dataclass(frozen=True, kw_only=True)
class JobConfig(Checked):
    """A whole job, checked: nothing in it is left to be looked up or guessed."""

    job: str = field(default="job", metadata={"check": plain_name})
    """Name of the job; that of its file, if the file does not say."""
    code: tuple[str, ...] = ()
    """Folders of the user's own modules, searched first: the job file's, then the current one."""
    model: Component
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    data: DataConfig
    loss: Component = field(default_factory=_cross_entropy)
    optimizer: Component
    schedule: ScheduleConfig | Component = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    dp: DpOptions = field(default_factory=DpOptions)
    layers: LayersOptions = field(default_factory=LayersOptions)
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)
    parameter_server: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    tensor: TensorOptions = field(default_factory=TensorOptions)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

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
