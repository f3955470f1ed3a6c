"""Opens the strategy that options name, for the ranks of a world."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.errors import ConfigError
from lockstep.reduce import Reducer, open_reducer
from lockstep.strategies.contract import Strategy
from lockstep.strategies.ddp import DistributedDataParallel
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.groups import Groups
from lockstep.strategies.hybrid import open_sharded_pipeline
from lockstep.strategies.layers import ModelParallel
from lockstep.strategies.one_forward import SyncedDistributedDataParallel, SyncedSingle
from lockstep.strategies.options import StrategyOptions
from lockstep.strategies.parameter_server import ParameterServer
from lockstep.strategies.pipeline import Pipeline, open_pipeline
from lockstep.strategies.single import Single
from lockstep.strategies.tensor import TensorParallel
from lockstep.strategy_options import mesh_of
from lockstep.sync_batch_norm import RankRows


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


def _open_dp(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    _require_one_process("dp", "strategy 'ddp'", groups)
    devices = _devices_of_process(device, options.dp.replicas)
    return DataParallel(devices, options.micro_batches, torch.get_num_threads(), options.running_buffers)


def _open_layers(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    group, count = groups.along("data"), groups.mesh.size("layers")
    if options.strategy == "layers":
        _require_one_process("layers", "strategy 'hybrid' with a mesh such as data=2,layers=2", groups)
        count = options.layers.devices
    devices = _devices_of_process(device, count)
    reducer = _open_reducer(options, group, device) if group is not None else None
    k, buffers = options.micro_batches, options.running_buffers
    return ModelParallel(devices, k, options.layers, reducer, group, buffers)


def _require_one_process(strategy: str, other: str, groups: Groups) -> None:
    if groups.world is not None:
        raise ConfigError(
            f"strategy {strategy!r} uses all its devices from one process, and {groups.world.size()} were started. "
            f"Start one, or use {other}."
        )


def _devices_of_process(first: torch.device, count: int) -> list[torch.device]:
    """The devices of one process: ``count`` from its first; 0 for all GPUs, or two on CPUs, which are all the same."""
    if first.type == "cpu":
        return [first] * (count or 2)
    start, found = first.index or 0, torch.cuda.device_count()
    if start + count > found:
        raise ConfigError(
            f"{count} devices from number {start} on were asked for in one process, which sees {found} GPUs. Use fewer."
        )
    return [torch.device("cuda", number) for number in range(start, start + count if count else found)]


def _open_fsdp(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    group = groups.along("fsdp")
    if group is None:
        return _open_single(options, groups, device)
    _require_ordered(options)
    from lockstep.strategies.fsdp import FullyShardedDataParallel  # FSDP2 takes half a second to import

    return FullyShardedDataParallel(
        device, options.micro_batches, group, options.fsdp, options.running_buffers
    )


def _open_parameter_server(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    group = groups.along("data")
    if group is None:
        return _open_single(options, groups, device)
    _require_ordered(options)
    if options.parameter_server.mode == "asynchronous":
        return _open_asynchronous(options, group, device)
    servers = options.parameter_server.servers
    return ParameterServer(device, options.micro_batches, group, servers, options.running_buffers)


def _open_asynchronous(
    options: StrategyOptions, group: torch.distributed.ProcessGroup, device: torch.device
) -> Strategy:
    if options.precision == "fp16":
        raise ConfigError(
            "precision 'fp16' scales the loss by what all ranks find together, and workers of "
            "parameter_server.mode='asynchronous' find nothing together. Use precision bf16 or fp32, or "
            "mode='synchronous'."
        )
    from lockstep.strategies.parameter_server.asynchronous import AsynchronousParameterServer

    told, buffers = options.parameter_server, options.running_buffers
    return AsynchronousParameterServer(device, group, told, buffers, options.timeout)


def _open_pipeline(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    if groups.along("pipeline") is None:
        return _open_ddp(options, groups, device)
    return open_pipeline(
        Pipeline,
        options.pipeline,
        groups,
        device,
        options.micro_batches,
        options.running_buffers,
        lambda group: _open_reducer(options, group, device),
    )


def _open_tensor(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    if groups.along("tensor") is None:
        return _open_ddp(options, groups, device)
    data = groups.along("data")
    reducer = _open_reducer(options, data, device) if data is not None else None
    k, buffers = options.micro_batches, options.running_buffers
    return TensorParallel(device, k, groups, options.tensor, reducer, buffers)


def _open_sharded_pipeline(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    if groups.along("fsdp") is None:
        return _open_pipeline(options, groups, device)
    if groups.along("pipeline") is None:
        return _open_fsdp(options, groups, device)
    _require_ordered(options)
    k, buffers = options.micro_batches, options.running_buffers
    return open_sharded_pipeline(options.pipeline, options.fsdp, groups, device, k, buffers)


def _open_hybrid(options: StrategyOptions, groups: Groups, device: torch.device) -> Strategy:
    return _HYBRIDS[frozenset(name for name, _ in groups.mesh.axes)](options, groups, device)


def _require_ordered(options: StrategyOptions) -> None:
    if options.reduce != "ordered":
        raise ConfigError(
            f"strategy {options.strategy!r} has its own exchange, in the tree's order, and knows no "
            f"reduce={options.reduce!r}. Use reduce='ordered', or strategy 'ddp'."
        )


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
    frozenset({"data", "layers"}): _open_layers,
    frozenset({"data", "pipeline"}): _open_pipeline,
    frozenset({"data", "tensor"}): _open_tensor,
    frozenset({"fsdp", "pipeline"}): _open_sharded_pipeline,
}
"""By the axes of a mesh, as in ``mesh.HYBRIDS``."""

_OPEN: dict[str, Callable[[StrategyOptions, Groups, torch.device], Strategy]] = {
    "single": _open_single,
    "dp": _open_dp,
    "ddp": _open_ddp,
    "layers": _open_layers,
    "fsdp": _open_fsdp,
    "parameter_server": _open_parameter_server,
    "pipeline": _open_pipeline,
    "tensor": _open_tensor,
    "hybrid": _open_hybrid,
}
