"""The ways to train, sum and compute by name, and what each strategy can be told.

The options of a strategy are one frozen dataclass. ``RunOptions`` and ``JobConfig`` have a field of the strategy's name
for it, so it is a table of the job file, and a dict in ``lockstep.init``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.config.checks import CheckedOptions, at_least, one_of
from lockstep.core.mesh import Mesh, hybrid_mesh
from lockstep.errors import ConfigError, nearest

STRATEGIES = ("single", "dp", "ddp", "fsdp", "layers", "pipeline", "parameter_server", "tensor", "hybrid")
"""Every ``--strategy``."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Every ``--precision``."""

SYNC_BATCH_NORM = ("single", "ddp")
"""The strategies in which the micro-batches of a process run side by side if asked to."""


class Level(enum.Enum):
    """Agreement of a result with the same recipe on one device."""

    BITWISE = "A"
    """Equal bits after every step."""
    TOLERANCE = "B"
    """Equal within a stated bound; same data, same meaning."""
    STATISTICAL = "C"
    """The same quality at the end."""


REDUCERS = {
    "ordered": Level.BITWISE,
    "ring": Level.TOLERANCE,
    "bf16": Level.TOLERANCE,
    "powersgd": Level.STATISTICAL,
}
"""Every way to sum gradients over ranks, and the level that it promises."""


@dataclass(frozen=True, kw_only=True)
class DpOptions(CheckedOptions):
    """Table ``[dp]``: the replicas of one process."""

    replicas: int = field(default=0, metadata={"check": at_least(0)})
    """Replicas of the model, each with a device and a thread; 0: one for each device, on CPUs two."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions(CheckedOptions):
    """Table ``[fsdp]``: how parameters are gathered."""

    reshard_after_forward: bool = True
    """Frees a block's parameters after its forward pass and gathers them again for backward: less memory."""
    reshard_after_backward: bool = True
    """Frees all parameters after each micro-batch; false: after the step, so that they are gathered once. This takes
    the memory of all parameters, and needs ``reshard_after_forward`` to be false, too."""
    cpu_offload: bool = False
    """Keeps the rows of a rank and their optimizer state in the host's memory; GPUs only."""
    mixed_precision: str = field(default="", metadata={"check": one_of("", "bf16", "fp16")})
    """torch's own mixed precision instead of autocast, which casts otherwise: level B. Empty, bf16 or fp16."""


@dataclass(frozen=True, kw_only=True)
class _CutOptions(CheckedOptions):
    split: tuple[str, ...] = ()
    """The module with which each device or stage after the first begins; none: as ``balance`` says."""
    balance: str = field(default="bytes", metadata={"check": one_of("bytes", "time")})
    """Measure to balance without a split: bytes of the parameters, or time of a forward pass, measured at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split and self.balance != "bytes":
            table = type(self).__name__.removesuffix("Options").lower()
            raise ConfigError(
                f"{table}.balance={self.balance!r} finds where the model is cut, and {table}.split={list(self.split)} "
                "says it. Give one of the two."
            )


@dataclass(frozen=True, kw_only=True)
class LayersOptions(_CutOptions):
    """Table ``[layers]``: how a model is cut for the devices of one process."""

    devices: int = field(default=0, metadata={"check": at_least(0)})
    """Devices that hold consecutive layers; 0: all of them, on CPUs two."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(_CutOptions):
    """Table ``[pipeline]``: how a model is cut into stages, and in which order they compute."""

    schedule: str = field(default="1f1b", metadata={"check": one_of("1f1b", "gpipe", "interleaved")})
    """Order of the passes: 1f1b, gpipe (keeps more activations) or interleaved (several stages per rank)."""
    stages_per_rank: int = field(default=0, metadata={"check": at_least(0)})
    """Stages that each rank holds; 0: two with schedule interleaved, one with the others, which allow no more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule != "interleaved" and self.stages_per_rank > 1:
            raise ConfigError(
                f"pipeline.stages_per_rank={self.stages_per_rank} needs schedule 'interleaved', and the schedule is "
                f"{self.schedule!r}."
            )

    @property
    def stages_of_a_rank(self) -> int:
        """Stages that each rank holds."""
        return self.stages_per_rank or (2 if self.schedule == "interleaved" else 1)

    def check_micro_batches(self, micro_batches: int, holders: int, ranks: int) -> None:
        """Refuses fewer micro-batches than fill the pipeline once.

        Args:
            micro_batches: K of the recipe.
            holders: data-parallel replicas, each of which is a pipeline.
            ranks: length of the pipeline.

        Raises:
            ConfigError: names the nearest K that would work.
        """
        if self.schedule == "interleaved":
            step = holders * ranks
            if micro_batches % step:
                working = max(1, round(micro_batches / step)) * step
                raise ConfigError(
                    f"micro_batches={micro_batches} do not fit the interleaved schedule, which takes rounds of "
                    f"{ranks}, one for each pipeline rank, on each of {holders} data-parallel replicas. Use a multiple "
                    f"of {step}, for example micro_batches={working}, or schedule '1f1b'."
                )
        elif micro_batches // holders < ranks:
            raise ConfigError(
                f"A pipeline of {ranks} stages is not filled by micro_batches={micro_batches} over {holders} "
                f"data-parallel replicas, which leave {micro_batches // holders} for some. Use at least "
                f"micro_batches={holders * ranks}, or fewer stages."
            )


TENSOR_KINDS = ("column", "row", "heads", "channels", "features")
"""Ways in which strategy tensor splits a module; see docs/strategies/tensor.md."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(CheckedOptions):
    """Table ``[tensor]``: which layers are split over ranks."""

    plan: tuple[str, ...] = ()
    """Splits of modules, as `"name pattern=kind"` with the kinds column, row, heads, channels and features; none:
    what is known of the model."""
    shards: int = field(default=0, metadata={"check": at_least(0)})
    """Shards of each split layer, a multiple of the ranks: part of the recipe, as micro_batches is, for level A;
    strategies single and ddp then compute in shards too. 0: one for each rank, level B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for entry in self.plan:
            pattern, _, kind = entry.rpartition("=")
            if not pattern:
                raise ConfigError(f"tensor.plan has the entry {entry!r}; write for example '*.fc1=column'.")
            if kind not in TENSOR_KINDS:
                raise ConfigError(
                    f"tensor.plan gives {pattern!r} the kind {kind!r}, which is not known.{nearest(kind, TENSOR_KINDS)}"
                )


@dataclass(frozen=True, kw_only=True)
class ParameterServerOptions(CheckedOptions):
    """Table ``[parameter_server]``: who holds the parameters."""

    servers: int = field(default=1, metadata={"check": at_least(1)})
    """Processes that hold parameters and step the optimizer: the last ones, with mode asynchronous the
    first."""
    mode: str = field(default="synchronous", metadata={"check": one_of("synchronous", "asynchronous")})
    """synchronous (level A), or asynchronous: workers do not wait for each other (level C)."""
    staleness: int = field(default=4, metadata={"check": at_least(0)})
    """With mode asynchronous: how many steps a worker may be ahead of the slowest when it begins one; 0: none."""
    snapshot_every: int = field(default=100, metadata={"check": at_least(0)})
    """With mode asynchronous: steps between checkpoints from which a lost server is recovered; 0: none of its own."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(CheckedOptions):
    """The options of every strategy that has some, in a field of its name."""

    dp: DpOptions = field(default_factory=DpOptions)
    """The replicas of strategy dp."""
    layers: LayersOptions = field(default_factory=LayersOptions)
    """Cuts of the model with strategy layers."""
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)
    """Gathering of parameters with strategy fsdp."""
    parameter_server: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    """Holders of the parameters with strategy parameter_server."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """Cuts of the model with strategy pipeline, and the order in which its stages compute."""
    tensor: TensorOptions = field(default_factory=TensorOptions)
    """Layers that strategy tensor splits."""


OPTIONS: dict[str, Any] = {option.name: option.default_factory for option in fields(StrategyOptions)}
"""The class of options of each strategy that has some."""

IN_SHARDS = ("single", "ddp", "tensor")
"""The strategies that compute split layers in ``tensor.shards``; also ``hybrid`` of ``data`` and ``tensor``."""

OWN_EXCHANGE = ("fsdp", "parameter_server")
"""The strategies that exchange gradients in a way of their own, for which no reducer can be chosen."""

ONE_PROCESS = {"dp": "replicas", "layers": "devices"}
"""The strategies that use several devices from one process, and their option that says how many."""

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
"""The optimizers of ``torch.optim`` that update every element only from that element."""

_AXES = {
    "parameter_server": "data",
    "single": "data",
    "dp": "data",
    "ddp": "data",
    "fsdp": "fsdp",
    "layers": "data",
    "pipeline": "pipeline",
    "tensor": "tensor",
}
"""The axis of the mesh along which a strategy lays all its ranks."""


def devices_per_process(mesh: str) -> int:
    """Devices that each process of a mesh uses."""
    return Mesh.parse(mesh).size("layers") if mesh else 1


def mesh_of(strategy: str, mesh: str, world_size: int) -> Mesh:
    """Lays out a world of this size for a strategy.

    Args:
        strategy: one of ``STRATEGIES``.
        mesh: ``data=2,pipeline=2`` for ``hybrid``; empty for the others.
        world_size: number of processes.

    Raises:
        ConfigError: strategy and mesh do not go together, or the mesh does not fit the world.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy {strategy!r} is not known.{nearest(strategy, STRATEGIES)}")
    if strategy == "hybrid":
        if not mesh:
            raise ConfigError("strategy 'hybrid' needs a mesh, such as mesh='data=2,pipeline=2'.")
        laid_out = hybrid_mesh(mesh)
        laid_out.check_world(world_size)
        return laid_out
    if mesh:
        raise ConfigError(f"mesh={mesh!r} belongs to strategy 'hybrid', and the strategy is {strategy!r}.")
    return Mesh.single(_AXES[strategy], world_size)


def shares_rows_out(strategy: str, mesh: str) -> bool:
    """True where parameters are shared out by rows, with an exchange of gradients of their own."""
    return strategy == "fsdp" or (strategy == "hybrid" and "fsdp" in mesh)


def steps_parts(strategy: str, mesh: str) -> bool:
    """True where an optimizer sees parts of parameters, so that its update must be elementwise."""
    return strategy == "tensor" or "tensor" in mesh or "fsdp" in mesh
