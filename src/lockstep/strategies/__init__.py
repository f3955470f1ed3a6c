"""Ways to train: one file or folder each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lockstep.errors import ConfigError
from lockstep.reduce import Reducer, open_reducer
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.groups import Groups
from lockstep.strategies.one_forward import SyncedDistributedDataParallel, SyncedSingle
from lockstep.strategies.pipeline import Pipeline, open_pipeline
from lockstep.strategies.single import Single
from lockstep.strategy_options import STRATEGIES, FsdpOptions, PipelineOptions, mesh_of
from lockstep.sync_batch_norm import RankRows

__all__ = [
    "STRATEGIES",
    "Compute",
    "DistributedDataParallel",
    "Groups",
    "Pipeline",
    "Single",
    "StepResult",
    "Strategy",
    "open_strategy",
]


class StrategyOptions(Protocol):
    """What a strategy is told."""

    @property
    def strategy(self) -> str: ...  # fields of RunOptions
    @property
    def mesh(self) -> str: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def reduce(self) -> str: ...
    @property
    def powersgd_rank(self) -> int: ...
    @property
    def sync_batch_norm(self) -> bool: ...
    @property
    def running_buffers(self) -> Sequence[str]: ...
    @property
    def timeout(self) -> float: ...
    @property
    def shared_memory(self) -> bool: ...
    @property
    def fsdp(self) -> FsdpOptions: ...
    @property
    def pipeline(self) -> PipelineOptions: ...


def open_strategy(
    options: StrategyOptions, group: torch.distributed.ProcessGroup | None, device: torch.device
) -> Strategy:
    """The strategy that the options name, for the ranks of ``group``. Collective.

    In a world of one, a strategy that lays out ranks is ``single``.

    Raises:
        ConfigError: the strategy is not known, or it does not fit the world.
    """
    world_size = 1 if group is None else group.size()
    mesh = mesh_of(options.strategy, options.mesh, world_size)
    if options.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"strategy 'single' trains on one device, and {world_size} processes were started. Use strategy 'ddp', or "
            "start one process."
        )
    return _OPEN[options.strategy](options, Groups.open(mesh, group), device)


def _open_single(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    kind = SyncedSingle if options.sync_batch_norm else Single
    return kind(device, options.micro_batches, running_buffers=options.running_buffers)


def _open_ddp(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    group = groups.along("data")
    if group is None:
        return _open_single(options, groups, device)
    reducer = _open_reducer(options, group, device)
    if options.sync_batch_norm:
        rows = RankRows.open(group, device, options.timeout, options.shared_memory)
        return SyncedDistributedDataParallel(
            device, options.micro_batches, reducer, group, rows, options.running_buffers
        )
    return DistributedDataParallel(device, options.micro_batches, reducer, group, options.running_buffers)


def _open_fsdp(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    group = groups.along("fsdp")
    if group is None:
        return _open_single(options, groups, device)
    from lockstep.strategies.fsdp import FullyShardedDataParallel  # FSDP2 takes half a second to import

    return FullyShardedDataParallel(
        device, options.micro_batches, group, options.fsdp, options.running_buffers
    )


def _open_pipeline(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    if groups.along("pipeline") is None:
        return _open_ddp(options, groups, device)
    return open_pipeline(
        options.pipeline,
        groups,
        device,
        options.micro_batches,
        options.running_buffers,
        lambda group: _open_reducer(options, group, device),
    )


def _open_hybrid(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    axes = frozenset(name for name, _ in groups.mesh.axes)
    if axes not in _HYBRIDS:
        known = " and ".join(",".join(f"{name}=N" for name in sorted(each)) for each in _HYBRIDS)
        raise ConfigError(f"strategy 'hybrid' has no layout for the mesh {groups.mesh}. It knows: {known}.")
    return _HYBRIDS[axes](options, groups, device)


def _open_reducer(
    options: StrategyOptions, group: torch.distributed.ProcessGroup, device: torch.device
) -> Reducer:
    return open_reducer(
        options.reduce,
        group,
        device,
        options.timeout,
        options.shared_memory,
        powersgd_rank=options.powersgd_rank,
    )


_HYBRIDS: dict[frozenset[str], Callable[[StrategyOptions, Groups, torch.device], Strategy]] = {
    frozenset({"data", "pipeline"}): _open_pipeline,
}
"""The axes of a mesh that go together."""

_OPEN: dict[str, Callable[[StrategyOptions, Groups, torch.device], Strategy]] = {
    "single": _open_single,
    "ddp": _open_ddp,
    "fsdp": _open_fsdp,
    "pipeline": _open_pipeline,
    "hybrid": _open_hybrid,
}
