"""Opens the strategy that options name, for the ranks of a world."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.config.options import RunOptions
from lockstep.config.rules import AvailableDevices, require_rules
from lockstep.config.strategy_options import ONE_PROCESS, Level, devices_per_process, mesh_of
from lockstep.core.mesh import Mesh
from lockstep.core.world import shared_devices
from lockstep.distributed.process_group import Groups
from lockstep.distributed.rank_exchange import RankExchange, open_exchange
from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import RankRows
from lockstep.reduce import Reducer, open_reducer
from lockstep.runtime.devices import count_gpus, gpu, is_gpu
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.strategies.concurrent_micro_batches import SynchronizedReplicas
from lockstep.strategies.ddp import DistributedDataParallel, Single
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.hybrid import OrderedRowReducer, ShardedPipeline
from lockstep.strategies.layers import ModelParallel
from lockstep.strategies.parameter_server import ParameterServer
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.strategy import Strategy
from lockstep.strategies.tensor import TensorParallel


def open_strategy(
    options: RunOptions,
    group: torch.distributed.ProcessGroup | None,
    device: torch.device,
    events: StepEvents = NO_EVENTS,
) -> Strategy:
    """The strategy that the options name, for the ranks of ``group``. Collective.

    In a world of one, a strategy that lays out ranks is ``single``.

    Args:
        group: all ranks; None for a world of one.

    Raises:
        ConfigError: the strategy is not known, or it does not fit the world.
    """
    world_size = 1 if group is None else group.size()
    count = None if options.strategy in ONE_PROCESS else world_size * devices_per_process(options.mesh)
    require_rules(options, AvailableDevices(world_size, count, device.type))
    mesh = mesh_of(options.strategy, options.mesh, world_size)
    strategy = _opener(options, mesh)(options, Groups.open(mesh, group, device), device)
    strategy.events, strategy.all_ranks = events, group
    strategy.running_buffers = options.running_buffers
    if is_gpu(device) and not options.deterministic:
        strategy.level = Level.STATISTICAL
    return strategy


def _opener(options: RunOptions, mesh: Mesh) -> Callable[[RunOptions, Groups, torch.device], Strategy]:
    """The function that opens the strategy: its name decides, or else which axes of the mesh have several ranks."""
    axes = {axis for axis, size in mesh.axes if size > 1}
    if options.strategy == "dp":
        return _open_dp
    if options.strategy == "layers" or "layers" in dict(mesh.axes):
        return _open_layers
    if "tensor" in axes or options.tensor.shards:
        return _open_tensor
    if "pipeline" in axes:
        return _open_pipeline
    if "fsdp" in axes:
        return _open_fsdp
    if "data" in axes:
        return _open_parameter_server if options.strategy == "parameter_server" else _open_ddp
    return _open_single


def _open_single(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    if options.sync_batch_norm:
        return SynchronizedReplicas(device, options.micro_batches, RankRows(None))
    return Single(device, options.micro_batches)


def _open_ddp(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    group = groups.line("data")
    # Beside the exchanges of BatchNorm, a kernel that waits could hold up another that is waited for.
    reducer = _open_reducer(options, group, device, may_fuse=not options.sync_batch_norm)
    if options.sync_batch_norm:
        rows = RankRows.open(group, device, options.timeout, options.shared_memory)
        return SynchronizedReplicas(device, options.micro_batches, rows, reducer, group)
    return DistributedDataParallel(device, options.micro_batches, reducer, group)


def _open_dp(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    _require_one_process("dp", "strategy 'ddp'", groups)
    devices = _devices_of_process(device, options.dp.replicas, groups)
    return DataParallel(devices, options.micro_batches, torch.get_num_threads())


def _open_layers(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    group, count = groups.along("data"), groups.mesh.size("layers")
    if options.strategy == "layers":
        _require_one_process("layers", "strategy 'hybrid' with a mesh such as data=2,layers=2", groups)
        count = options.layers.devices
    devices = _devices_of_process(device, count, groups)
    reducer = _open_reducer(options, group, device) if group is not None else None
    return ModelParallel(devices, options.micro_batches, options.layers, reducer, group)


def _require_one_process(strategy: str, other: str, groups: Groups) -> None:
    if groups.world is not None:
        raise ConfigError(
            f"Strategy {strategy!r} uses all its devices from one process, but {groups.world.size()} processes were "
            f"started. Start one, or use {other}."
        )


def _devices_of_process(first: torch.device, count: int, groups: Groups) -> list[torch.device]:
    """The devices of one process: ``count`` from its first; 0 for all GPUs, or two on CPUs, which are all the same."""
    if first.type == "cpu":
        return [first] * (count or 2)
    start, found = first.index or 0, count_gpus()
    if shared := shared_devices():
        count = count or len(shared)
        begin = groups.rank % max(1, len(shared) // count) * count
        return [gpu(number) for number in shared[begin : begin + count]]
    if start + count > found:
        raise ConfigError(
            f"{count} devices starting at cuda:{start} were requested, but this process sees {found} GPUs. Use fewer."
        )
    return [gpu(number) for number in range(start, start + count if count else found)]


def _open_fsdp(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    from lockstep.strategies.fsdp import FullyShardedDataParallel

    group = groups.line("fsdp")
    exchange = _open_exchange(options, group, device)
    return FullyShardedDataParallel(device, options.micro_batches, group, exchange, options.fsdp)


def _open_parameter_server(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    group, table = groups.line("data"), options.parameter_server
    if table.mode == "asynchronous":
        from lockstep.strategies.parameter_server.asynchronous import AsynchronousParameterServer

        return AsynchronousParameterServer(device, group, table, options.timeout)
    return ParameterServer(device, options.micro_batches, group, table.servers)


def _open_pipeline(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    kind: type[Pipeline] = ShardedPipeline if groups.along("fsdp") is not None else Pipeline
    holders, lines = groups.along(kind.axis), []
    if holders is not None:
        # Stages finish in another order on every holder, so each has a group of its own.
        more = range(1, options.pipeline.stages_of_a_rank)
        lines = [holders, *(groups.another(kind.axis, device) for _ in more)]
    reducers: list[Reducer] = [
        OrderedRowReducer(line, device) if kind is ShardedPipeline else _open_reducer(options, line, device)
        for line in lines
    ]
    assert groups.world is not None, "a pipeline has several ranks"
    return kind(
        device,
        options.micro_batches,
        groups,
        reducers,
        _open_exchange(options, groups.world, device),
        options.pipeline,
        timeout=options.timeout,
        shared_memory=options.shared_memory,
    )


def _open_tensor(options: RunOptions, groups: Groups, device: torch.device) -> Strategy:
    data = groups.along("data")
    reducer = _open_reducer(options, data, device) if data is not None else None
    group = groups.along("tensor")
    between = _open_exchange(options, group, device) if group is not None else None
    return TensorParallel(device, options.micro_batches, groups, between, options.tensor, reducer)


def _open_exchange(options: RunOptions, group: torch.distributed.ProcessGroup, device: torch.device) -> RankExchange:
    return open_exchange(group, device, options.timeout, options.shared_memory)


def _open_reducer(
    options: RunOptions,
    group: torch.distributed.ProcessGroup,
    device: torch.device,
    *,
    may_fuse: bool = False,
) -> Reducer:
    return open_reducer(
        options.reduce,
        group,
        device,
        options.timeout,
        options.shared_memory,
        powersgd_rank=options.powersgd_rank,
        may_fuse=may_fuse,
    )
