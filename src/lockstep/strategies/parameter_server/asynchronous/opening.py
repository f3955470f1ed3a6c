"""Connects the processes of an asynchronous run, while there is a process group that tells them where."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from lockstep.buffers import RunningBuffers
from lockstep.collectives import gather_json
from lockstep.strategies.parameter_server.asynchronous.client import Client, get_values
from lockstep.strategies.parameter_server.asynchronous.clock import Clock
from lockstep.strategies.parameter_server.asynchronous.inbox import Inbox
from lockstep.strategies.parameter_server.asynchronous.pool import Pool
from lockstep.strategies.parameter_server.asynchronous.role import Role
from lockstep.strategies.parameter_server.asynchronous.server import Server
from lockstep.strategies.parameter_server.asynchronous.service import Service
from lockstep.strategies.parameter_server.asynchronous.tensors import ModelBuffers
from lockstep.strategies.parameter_server.asynchronous.worker import Worker
from lockstep.strategies.parameter_server.holding import Holding
from lockstep.strategy_options import ParameterServerOptions

_SMALL = 1 << 20
"""Bytes that bodies may have beside gradients and values."""


def open_role(
    group: dist.ProcessGroup,
    token: bytes,
    options: ParameterServerOptions,
    holding: Holding,
    model: nn.Module,
    running_buffers: tuple[RunningBuffers, Sequence[str]],
    patience: float,
    step: int,
) -> Role:
    """This process's part, connected. Collective.

    Args:
        group: all ranks, the servers first.
        token: the run's secret, the same on every rank.
        options: servers and staleness.
        holding: what is held where.
        model: on its device.
        running_buffers: its running buffers, and the name patterns of those that were declared.
        patience: seconds that a message which was begun may take.
        step: steps that the run has done.
    """
    rank, servers = dist.get_rank(group), list(range(options.servers))
    buffers, declared = running_buffers
    sent = ModelBuffers(model, declared)
    is_server = rank in servers
    inbox = Inbox(token, rank, _largest(holding, sent), patience) if is_server else None
    ports = gather_json(inbox.port if inbox is not None else 0, group, holding.device)
    if inbox is None:
        client = Client(rank, {each: ports[each] for each in servers}, token, patience, holding, sent)
        return Worker(client, holding, buffers, step)
    for other in servers[:rank]:
        inbox.join(other, ports[other])
    workers = range(len(servers), dist.get_world_size(group))
    statistics, counters = (buffers.numel, buffers.counters) if rank == 0 else (0, 0)
    service = Service(
        inbox,
        servers,
        rank,
        Clock(workers, options.staleness, step),
        lambda: Pool(holding, statistics, counters, buffers.dtype),
        lambda: get_values(holding, sent),
    )
    return Server(service, servers, holding, buffers, sent, step, options.staleness)


def _largest(holding: Holding, sent: ModelBuffers) -> int:
    """Bytes of the largest body that a server takes: a push, another server's values, or a part of one's state."""
    values = max(holding.numel(server) for server in range(len(holding.keys))) * 8
    return values + sent.nbytes + _SMALL
