"""What a run is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, nearest
from lockstep.plan import BatchShape
from lockstep.precision import PRECISIONS
from lockstep.reduce import REDUCERS
from lockstep.strategy_options import (
    OPTIONS,
    STRATEGIES,
    SYNC_BATCH_NORM,
    DpOptions,
    FsdpOptions,
    LayersOptions,
    ParameterServerOptions,
    PipelineOptions,
    TensorOptions,
)
from lockstep.timeline.window import Window


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The recipe of a run, and how it is carried out. The first part decides the result; the second does not."""

    global_batch: int
    """Samples per optimizer step, over all devices together."""
    micro_batches: int = 8
    """K: micro-batches per step; at most this many devices can share a step."""
    seed: int = 0
    """Decides the order of the samples, their augmentation, and every random number the model draws."""
    precision: str = "fp32"
    """fp32, tf32, bf16 or fp16."""
    reduce: str = "ordered"
    """How gradients are summed over ranks: ordered (level A), ring or bf16 (level B), or powersgd (level C)."""
    powersgd_rank: int = 4
    """Columns of the two factors that powersgd sends instead of a gradient matrix."""
    threads: int | None = None
    """CPU threads of each rank; by default what the launcher set, or 1. Part of the recipe on a CPU."""
    channels_last: bool = False
    """Keep the weights and inputs of convolutions in channels-last order."""
    compile: bool = False
    """Compile the model's blocks with torch.compile; another recipe than eager."""
    sync_batch_norm: bool = False
    """Compute BatchNorm over the whole global batch (level B); a process then runs its share of a step in one forward
    pass. With strategy single or ddp."""
    running_buffers: tuple[str, ...] = ()
    """Name patterns of buffers, beside BatchNorm's, that the forward pass changes and that are to be averaged."""

    strategy: str = "ddp"
    """How the work is laid out; one of ``lockstep.strategy_options.STRATEGIES``."""
    mesh: str = ""
    """The axes of strategy hybrid, outermost first: "data=2,pipeline=2"."""
    dp: DpOptions = field(default_factory=DpOptions)
    """The replicas of strategy dp."""
    layers: LayersOptions = field(default_factory=LayersOptions)
    """Where strategy layers cuts the model."""
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)
    """How strategy fsdp gathers parameters."""
    parameter_server: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    """Who holds the parameters under strategy parameter_server."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """How strategy pipeline cuts the model, and in which order its stages compute."""
    tensor: TensorOptions = field(default_factory=TensorOptions)
    """Which layers strategy tensor splits."""
    directory: Path | str | None = None
    """The run folder, for checkpoints and logs; nothing is written without one."""
    resume: str = ""
    """Empty: start anew. "auto": go on from the newest sound checkpoint of ``directory``, if any. Else: the path of
    one checkpoint."""
    force_context: bool = False
    """Resume although the checkpoint was written with other software, device or threads (level B from there on)."""
    keep: int | None = 3
    """How many checkpoints stay, beside the best; None for all."""
    save_in_background: bool = True
    """Write checkpoints from a copy of the state while training goes on; False: training waits for the disk."""
    fingerprint_every: int = 100
    """Steps between comparisons of all parameters over the ranks; 0 for none."""
    shared_memory: bool = True
    """Let CPU ranks of one host exchange gradients through shared memory."""
    evaluation_batch: int | None = None
    """Samples per forward pass of an evaluation; by default as many as in a training micro-batch."""
    prefetch: int = 2
    """Steps that loader workers read ahead, at least 1; without workers nothing is."""
    loader_timeout: float = 120.0
    """Seconds after which a loader worker that gives nothing is an error."""
    timeout: float = 600.0
    """Seconds a rank waits for another before it gives up."""
    profile: str = ""
    """FIRST:COUNT, as in "10:5": writes down what each rank did when in COUNT steps after the first FIRST, as
    ``timeline.json`` in ``directory``."""

    def __post_init__(self) -> None:
        BatchShape(global_batch=self.global_batch, micro_batches=self.micro_batches)
        for name, known in (("precision", PRECISIONS), ("reduce", REDUCERS), ("strategy", STRATEGIES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} {value!r} is not known.{nearest(str(value), known)}")
        if self.resume and self.resume == "auto" and self.directory is None:
            raise ConfigError("resume='auto' needs the run folder to look in: give directory=....")
        if self.profile and Window.parse(self.profile) and self.directory is None:
            raise ConfigError(
                f"profile={self.profile!r} needs the run folder to write to: give directory=...."
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must be at least 0 and below 2^63.")
        for name in ("threads", "powersgd_rank", "prefetch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.sync_batch_norm and self.strategy not in SYNC_BATCH_NORM:
            raise ConfigError(
                f"sync_batch_norm=True runs a process's whole share of a step in one forward pass, which strategy "
                f"{self.strategy!r} does not. Use strategy 'ddp'."
            )
        if self.sync_batch_norm and self.compile:
            raise ConfigError(
                "sync_batch_norm=True exchanges statistics in the middle of the model, where compile=True cannot go. "
                "Use one of the two."
            )
        if self.reduce == "powersgd" and self.precision == "fp16":
            raise ConfigError(
                "reduce='powersgd' keeps gradients from step to step, and precision fp16 changes their scale between "
                "them. Use precision bf16 or fp32, or reduce='bf16'."
            )

    @property
    def shape(self) -> BatchShape:
        """Global batch and micro-batches."""
        return BatchShape(global_batch=self.global_batch, micro_batches=self.micro_batches)

    def as_text(self) -> dict[str, str]:
        """Every field as text, to compare over ranks."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, **options: Any) -> RunOptions:
        """Makes options from keywords; ``ConfigError`` names an unknown one and its nearest known name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"lockstep.init has no option {name!r}.{nearest(name, known)}")
        if "global_batch" not in options:
            raise ConfigError(
                "lockstep.init needs global_batch: the samples per optimizer step over all devices."
            )
        return cls(**{name: _read(name, value) for name, value in options.items()})


def _read(name: str, value: Any) -> Any:
    """The options of a strategy from a dict; anything else as it is."""
    kind = OPTIONS.get(name)
    if kind is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"lockstep.init takes {name}={{...}}, a dict of options, and was given {value!r}.")
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name} has no option {key!r}.{nearest(str(key), known)}")
    return kind(**{key: tuple(item) if isinstance(item, list) else item for key, item in value.items()})
