"""The options of a run: those of `lockstep.init`, and those that job files share with it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

from lockstep.config.checks import (
    CheckedOptions,
    KeyPath,
    Problem,
    at_least,
    between,
    check_fields,
    field_types,
    file_path,
    more_than,
    one_of,
    python_type_problem,
    refuse,
    seconds,
    seed,
    threads,
)
from lockstep.config.rules import require_rules
from lockstep.config.strategy_options import OPTIONS, PRECISIONS, REDUCERS, STRATEGIES, StrategyOptions
from lockstep.core.mesh import Mesh
from lockstep.core.plan import BatchShape
from lockstep.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recipe(CheckedOptions):
    """The options that a keyword of `lockstep.init` and a key of the table ``[training]`` both give."""

    global_batch: int = field(metadata={"check": at_least(1)})
    """Samples per optimizer step, over all devices together."""
    micro_batches: int = field(default=8, metadata={"check": at_least(1)})
    """K: how many parts the global batch is computed in; at most K devices can share it."""
    seed: int = field(default=0, metadata={"check": seed})
    """Decides the first weights, the order of the samples, augmentation, dropout and a split by seed."""
    precision: str = field(default="fp32", metadata={"check": one_of(*PRECISIONS)})
    """Number format of the computation: fp32, tf32, bf16, or fp16 with loss scaling."""
    loss_scale: float | None = field(default=None, metadata={"check": more_than(0)})
    """Loss scale that fp16 begins with; none: 65536 divided by the samples of a micro-batch, as a power of two."""
    loss_scale_growth_factor: float = field(default=2.0, metadata={"check": more_than(1)})
    """Factor on the loss scale after ``loss_scale_growth_interval`` steps in a row whose gradients were finite."""
    loss_scale_backoff_factor: float = field(default=0.5, metadata={"check": between(0, 1)})
    """Factor on the loss scale after a step whose gradients were not finite, which is skipped."""
    loss_scale_growth_interval: int = field(default=2000, metadata={"check": at_least(1)})
    """Optimizer steps from one growth of the loss scale to the next."""
    reduce: str = field(default="ordered", metadata={"check": one_of(*REDUCERS)})
    """Sum of gradients: ordered (level A, bitwise), ring (B, the backend's all-reduce), bf16 (B, rounded to
    half the bytes) or powersgd (C, compressed)."""
    powersgd_rank: int = field(default=4, metadata={"check": at_least(1)})
    """Columns of the two factors that powersgd sends instead of a gradient matrix."""
    channels_last: bool = False
    """Keeps images and convolution weights in channels-last order."""
    compile: bool = False
    """Compiles the model with torch.compile; another recipe than the same job without."""
    portable: bool | str = field(default=False, metadata={"check": one_of(True, False, "auto")})
    """The same bits on every x86-64 CPU with AVX2; CPU only. "auto": where this machine can give them."""
    deterministic: bool = True
    """Refuses operators of CUDA that add in no fixed order, such as the gradient of bilinear interpolation, and lets
    one thread of a CPU add up the gradient of table[rows]; false lets them run (level C), without ``checks`` on CUDA,
    which compare bits."""
    sync_batch_norm: bool = False
    """Computes BatchNorm over the whole global batch; strategies single and ddp have it."""
    running_buffers: tuple[str, ...] = ()
    """Patterns of buffers, beside BatchNorm's, that the forward pass changes: averaged, or added up if integer."""
    strategy: str = field(default="ddp", metadata={"check": one_of(*STRATEGIES)})
    """Layout of the work: single (one device), ddp (a process and a replica per device), ..."""
    mesh: str = ""
    """The axes of strategy hybrid, the outermost first: ``data=2,pipeline=2``."""
    fingerprint_every: int = field(default=100, metadata={"check": at_least(0)})
    """Optimizer steps between two comparisons of the ranks' parameter bits, which are also made at the end of an epoch
    and before an evaluation; 0: none before the end."""
    checks: str = field(default="first", metadata={"check": one_of("first", "always", "off")})
    """Rehearsals, which find state that user code keeps between forward passes: in the first two steps of each loss
    function, at the start of epochs, after as many steps again and in the last step; always, or off."""
    evaluation_batch: int | None = field(default=None, metadata={"check": at_least(1)})
    """Samples per forward pass of the evaluation; none: the batch size of a DataLoader that is evaluated, or as many as
    in a training micro-batch."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(StrategyOptions, Recipe):
    """The settings that the rules for a run compare; those of a job file, or of `lockstep.init`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunSettings):
    """The recipe of a run, and how it is carried out: the options of ``lockstep.init`` (docs/own-loop.md).

    The fields from ``directory`` on do not decide the result.
    """

    threads: int | None = field(default=None, metadata={"check": threads})
    """CPU threads of each rank; by default what the launcher set, or 1. Part of the recipe on a CPU."""
    directory: Path | str | None = field(default=None, metadata={"check": file_path})
    """The run folder, for checkpoints and logs, seen from where the run begins; nothing is written without one."""
    resume: str = field(default="", metadata={"check": file_path})
    """Empty: start fresh. "auto": resume from the newest sound checkpoint of ``directory``, if any. Else: the path of
    one checkpoint, or of a run folder, whose newest one counts."""
    force_context: bool = False
    """Resume although the checkpoint was written with other software, device or threads (level B from there on)."""
    keep: int | None = field(default=3, metadata={"check": at_least(1)})
    """Checkpoints that are kept, beside the best; None for all."""
    save_in_background: bool = True
    """Write checkpoints from a copy of the state while training continues; False: training waits for the disk."""
    shared_memory: bool = True
    """Let CPU ranks of one host exchange gradients through shared memory."""
    prefetch: int = field(default=2, metadata={"check": at_least(1)})
    """Steps that loader workers read ahead; without workers nothing is."""
    loader_timeout: float = field(default=120.0, metadata={"check": seconds()})
    """Seconds after which a loader worker that gives nothing is an error."""
    timeout: float = field(default=600.0, metadata={"check": seconds()})
    """Seconds a rank waits for another before it gives up."""
    profile: str = ""
    """FIRST:COUNT, as in "10:5": writes down what each rank did when in COUNT steps after the first FIRST, as
    ``timeline.json`` in ``directory``."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="")
        require_rules(self)
        if self.resume == "auto" and self.directory is None:
            raise ConfigError("resume='auto' needs the run folder to look in: give directory=....")
        if self.profile and self.directory is None:
            raise ConfigError(f"profile={self.profile!r} needs the run folder to write to: give directory=....")

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
                hint = _ELSEWHERE.get(name) or nearest(name, known)
                raise ConfigError(f"lockstep.init has no option {name!r}.{hint}")
        if "global_batch" not in options:
            raise ConfigError(
                "lockstep.init needs global_batch, the samples per optimizer step over all devices together: for a "
                "script that reads DataLoader(dataset, batch_size=32) on one device, lockstep.init(global_batch=32)."
            )
        values = {name: _read(name, value) for name, value in options.items()}
        refuse(_wrong_types(cls, values, ()))
        return cls(**values)


_DEVICES = " Devices belong to the command, lockstep run --devices 2 train.py."
_ELSEWHERE = {
    **dict.fromkeys(("device", "devices", "world_size", "num_processes"), _DEVICES),
    "batch_size": " Give global_batch, the samples of an optimizer step over all devices together.",
    "gradient_accumulation_steps": " Give a larger global_batch, and more micro_batches.",
    **dict.fromkeys(("amp", "fp16", "bf16", "mixed_precision"), " Give precision='bf16' or 'fp16'."),
    **dict.fromkeys(("save_every", "save_steps", "checkpoint_every"), " Call run.save() in the loop."),
    **dict.fromkeys(("out", "output_dir", "out_dir", "save_dir", "log_dir", "logdir"), " Give directory='...'."),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), " Give their number to run.epochs(...)."),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "gradient_clip_val"), " Call run.clip_gradients(1.0)."),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), " Give it to the optimizer."),
    **dict.fromkeys(("num_workers", "shuffle", "sampler", "pin_memory"), " Give run.batches a DataLoader that has it."),
}
"""The advice on options that other libraries have."""


def _read(name: str, value: Any) -> Any:
    """The options of a strategy from a dict, one pattern as a tuple of it, a path as its text; else as it is."""
    if name in ("resume", "profile") and value is None:
        return ""  # what argparse gives for an option that was left out
    if name == "resume" and isinstance(value, bool):
        remedy = "Give resume='auto' to go on from the newest checkpoint of directory, if any, or '' to start anew"
        raise ConfigError(f"resume should be a string and is {value}. {remedy}.")
    if name == "directory" and value == "":
        raise ConfigError("directory='' was given. Give a folder, such as 'runs/one' or '.', or leave it out.")
    if name in ("directory", "resume") and isinstance(value, str | Path):
        is_of_home = str(value).startswith("~") and file_path(value) is None
        value = Path(value).expanduser() if is_of_home else value
        return str(value) if name == "resume" else value
    if name == "running_buffers" and isinstance(value, str):
        return (value,)
    kind = OPTIONS.get(name)
    if kind is None or isinstance(value, kind):
        return _plain(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"lockstep.init takes {name}={{...}}, a dict of options, and was given {value!r}.")
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name} has no option {key!r}.{nearest(str(key), known)}")
    values = {key: tuple(item) if isinstance(item, list) else _plain(item) for key, item in value.items()}
    refuse(_wrong_types(kind, values, (name,)))
    return kind(**values)


def _plain(value: Any) -> Any:
    """The number of Python for one of NumPy, which not every library takes."""
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _wrong_types(cls: type, values: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    """The values that are not of their field's type, as the text "False" for true or false."""
    known = field_types(cast(Hashable, cls))
    for name, value in values.items():
        if problem := python_type_problem(known[name], value):
            remedy = " Leave it out for the default." if value is None and hasattr(cls, name) else ""
            yield Problem((*path, name), problem + remedy)


def unused_options(options: RunSettings) -> list[str]:
    """The options that differ from their defaults and belong to another strategy, as ``fsdp.cpu_offload``."""
    used = {options.strategy, "tensor" if options.tensor.shards else ""}  # other strategies refuse shards
    if options.mesh:
        used |= {axis for axis, _ in Mesh.parse(options.mesh).axes}
    return [
        f"{name}.{option.name}"
        for name, kind in OPTIONS.items()
        if name not in used
        for option in fields(kind)
        if getattr(getattr(options, name), option.name) != option.default
    ]


def mention_unused_options(options: RunSettings) -> None:
    """Logs one warning that names them, if there are any; the main process calls this."""
    if unused := unused_options(options):
        logger.warning("Strategy %r does not use what is set for others: %s.", options.strategy, ", ".join(unused))
    if options.reduce != "powersgd" and options.powersgd_rank != RunSettings.powersgd_rank:
        logger.warning("reduce %r does not use powersgd_rank.", options.reduce)
