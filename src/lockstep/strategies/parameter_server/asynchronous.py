"""Parameter server, asynchronous: workers push and pull without waiting for each other, within a bound on staleness.

    server (rank 0)   update 1 .... update 2 .. update 3 ....       optimizer, running buffers, checkpoints, log
    worker (rank 1)   step 1 | step 2 | step 3 | waits: 3 - 1 > 1   each pushes the gradient of its part of a step
    worker (rank 2)   step 1        | step 2        |               and pulls the current values

The first ranks are the servers, so that any worker may die: the main process, which logs and writes checkpoints, is a
server. After ``prepare`` there is no process group; processes talk over sockets, and wait for each other only where the
loop needs one result of all (an evaluation, a checkpoint, the start of an epoch). Every rank runs the same loop: a step
of a server is one update, made of as many pushes as there are living workers.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.strategy_options import Level, ParameterServerOptions
from lockstep.core.plan import Share
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.distributed.authentication import read_rank_key
from lockstep.distributed.collectives import drop_process_groups, gather_json
from lockstep.distributed.network import data_address
from lockstep.distributed.rendezvous import meeting_address
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.parameter_server.asynchronous_server import Server
from lockstep.strategies.parameter_server.asynchronous_staleness import Clock
from lockstep.strategies.parameter_server.asynchronous_transport import (
    ServerTransport,
    TransportSettings,
    as_bytes,
    from_bytes,
)
from lockstep.strategies.parameter_server.asynchronous_worker import Worker
from lockstep.strategies.parameter_server.shards import ParameterShards
from lockstep.strategies.strategy import Compute, IndependentStrategy, StepResult
from lockstep.text import numbered

logger = logging.getLogger(__name__)

_SMALL = 1 << 20
"""Bytes of a body beside gradients and values."""


class AsynchronousParameterServer(IndependentStrategy):
    """Distributes micro-batches over workers that need not keep step, and parameters over servers.

    Args:
        group: all ranks; the first ``options.servers`` are servers. ``prepare`` drops the group.
        timeout: seconds that a message may take once it has begun.
    """

    name = "parameter_server"
    level = Level.STATISTICAL
    replaces_parameters = True
    largest_unit = Unit.PLACE

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup, options: ParameterServerOptions, timeout: float
    ) -> None:
        ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.device, self._group, self._options, self._timeout = device, group, options, timeout
        self._servers = list(range(options.servers))
        self._set_workers(list(range(options.servers, ranks)))
        self._participant: Server | Worker | None = None
        self.save_every = options.snapshot_every

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Spreads the parameters over the servers; every rank keeps the model."""
        self._model = model.to(self.device)
        self._buffers = RunningBuffers(self._model, self.running_buffers)
        server = self._rank if self._rank in self._servers else -1
        self._shards = ParameterShards(self._model, len(self._servers), server)
        return self._model

    def leave_process_group(self, step: int, world: World) -> None:
        """Connects workers with servers. Collective, the last one over the process group.

        Raises:
            ConfigError: the ranks are on several hosts, and no supervisor has given them a key.
        """
        self._participant = self._connect(self._transport_settings(world), step)
        dist.barrier(self._group)
        drop_process_groups(self)

    def _transport_settings(self, world: World) -> TransportSettings:
        """How this process connects: on one host over loopback, else over the network, with the key of the ranks."""
        drawn = bytes.fromhex(gather_json(secrets.token_hex(32), self._group, self.device)[0])
        if world.nodes == 1:
            return TransportSettings(self._rank, drawn, self._timeout)
        key = read_rank_key(world.run_directory)
        rendezvous = meeting_address(world) if key else None
        if rendezvous is None:
            raise ConfigError(
                f"parameter_server.mode='asynchronous' was asked for on {world.nodes} hosts, where its connections are "
                f"authenticated with the hosts' token, and the launcher ({world.launcher}) has none. Start the run on "
                "each host with --nnodes (docs/hosts.md), or use one host, or mode='synchronous'."
            )
        host = data_address(*rendezvous, os.environ)
        return TransportSettings(self._rank, key, self._timeout, host, is_signed=True)

    def _connect(self, settings: TransportSettings, step: int) -> Server | Worker:
        """This process's part in the run, connected. Collective."""
        shards, buffers, rank = self._shards, self._buffers, self._rank
        sent = sum(tensor.nbytes for tensor in buffers.tensors())
        largest = max(shards.numel(server) for server in range(len(shards.keys))) * 8 + sent + _SMALL
        transport = ServerTransport(settings, largest) if rank in self._servers else None
        own = transport.address if transport is not None else None
        addresses = gather_json(own, self._group, self.device)
        if transport is None:
            served = {server: addresses[server] for server in self._servers}
            return Worker(settings, served, shards, buffers, step, self.events)
        for other in self._servers[:rank]:
            transport.join(other, addresses[other])
        clock = Clock(self._members, self._options.staleness, step)
        return Server(transport, self._servers, rank, clock, shards, buffers, step)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs a worker's part of a step, or collects the pushes of a server's update."""
        return self._connected.backward(batch, compute, scale=scale, stop=stop)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all workers that had a share of the samples; zeros for one that was lost since."""
        values = self._connected.barrier("gather", row.tolist()).values
        found = {rank: value for rank, value in enumerate(values) if value is not None}
        if missing := [rank for rank in self._members if rank not in found]:
            logger.warning("The part of this result that %s had is lost.", numbered("rank", missing))
        rows = [found.get(rank, [0.0] * row.numel()) for rank in self._members]
        return torch.tensor(rows, dtype=row.dtype, device=row.device)

    def sum_counts(self, row: Tensor) -> Tensor:
        """The counts that have arrived so far, on the main process."""
        return self._connected.sum_counts(row)

    def gather_records(self, value: Any) -> list[Any]:
        """The values of all living processes."""
        if self._participant is None:
            return gather_json(value, self._group, self.device)
        values = self._participant.barrier("gather records", value).values
        return [each for each in values if each is not None]

    def synchronize(self) -> None:
        """Sends the servers' values to all, and distributes the samples over the living workers."""
        if self._participant is not None:
            self._set_workers(self._participant.barrier("synchronize", None).living)
            self._participant.fetch()

    def after_step(self) -> None:
        """Workers push and pull; servers send new values."""
        self._connected.after_step()

    def release(self) -> None:
        """See ``Strategy.release``."""
        if self._participant is not None:
            participant, self._participant = self._participant, None
            participant.shutdown()
        super().release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """A server's keys; none on a worker."""
        return self._shards.own

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuses more than one."""
        if len(optimizers) > 1:
            raise ConfigError(
                "parameter_server.mode='asynchronous' makes one update from the pushes of workers, and run.prepare got "
                "several optimizers. Put their parameters into groups of one, or use mode='synchronous'."
            )

    def gradients(self) -> Iterable[Tensor]:
        """The mean gradient of a worker's part: each worker clips its own."""
        participant = self._connected
        return participant.gradients() if isinstance(participant, Worker) else ()

    def squares(self) -> Tensor:
        """Of ``gradients``; nothing is exchanged."""
        if isinstance(participant := self._connected, Worker):
            return participant.squares()
        return torch.zeros(1, dtype=torch.float64, device=self.device)

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the living ranks. Collective."""
        values = self._connected.barrier("compare", flags.tolist()).values
        found = torch.tensor([each for each in values if each is not None], dtype=flags.dtype)
        return found.amax(0).to(flags.device)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's state, the same on every rank: no rank continues before all have the servers' values."""
        self.synchronize()
        if self._participant is not None:
            self._participant.barrier("state", None)
        yield from super().state()

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``; gathered only on the main process. Collective where servers are several."""
        holders = self._shards.holders(name)
        found = torch.zeros(self._shards.parameters[name].shape, dtype=dtype, device=self.device)
        if part is not None:
            own = self._shards.local_shard(name, found)
            assert own is not None, f"this rank holds nothing of {name!r}"
            own.copy_(part)
        if [server for server, _ in holders] == [0]:
            return found
        body = b"" if part is None or self._rank == 0 else bytes(as_bytes(part.to(dtype)))
        bodies = self._connected.barrier(f"gather {name}", None, body).bodies
        for server, key in holders:
            if server in bodies:
                rows = key.of(found)
                rows.copy_(from_bytes(bytearray(bodies[server]), dtype, self.device).view(rows.shape))
        return found

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """The part that this server holds: all of it, or the rows of a large one."""
        return self._shards.local_shard(name, whole)

    def metrics(self) -> dict[str, float]:
        """Staleness since the last call."""
        participant = self._connected
        return participant.metrics() if isinstance(participant, Server) else {}

    def summary(self) -> dict[str, str]:
        """Staleness over the run, and the lost workers."""
        participant = self._connected
        return participant.summary() if isinstance(participant, Server) else {}

    @property
    def all_bytes_sent(self) -> int:
        """Bytes of gradients that a worker has pushed, or of values that a server has sent."""
        return self._participant.bytes_sent if self._participant is not None else 0

    @property
    def _connected(self) -> Server | Worker:
        assert self._participant is not None, "run.prepare connects workers with servers"
        return self._participant

    def _set_workers(self, members: list[int]) -> None:
        self._members = members
        holder = members.index(self._rank) if self._rank in members else None
        self.share = Share(holders=max(1, len(members)), holder=holder)
        self.is_expendable = holder is not None
