"""Parameter server, asynchronous: workers push and pull without waiting for each other, as far as a bound allows.

    server (rank 0)   update 1 .... update 2 .. update 3 ....       optimizer, running buffers, checkpoints, log
    worker (rank 1)   step 1 | step 2 | step 3 | waits: 3 - 1 > 1   each pushes the gradient of its part of a step
    worker (rank 2)   step 1        | step 2        |               and pulls what the values are by then

The first ranks are the servers, so that any worker may die: the main process, which logs and writes checkpoints, is
one. After ``prepare`` there is no process group any more; processes speak over sockets, and meet where the loop needs
one result of all (an evaluation, a checkpoint, the start of an epoch). Every rank runs the same loop: a step of a
server is one update, made of as many pushes as there are living workers.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers
from lockstep.collectives import gather_json, let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.elementwise import require_elementwise
from lockstep.strategies.parameter_server.asynchronous.opening import open_role
from lockstep.strategies.parameter_server.asynchronous.role import Role
from lockstep.strategies.parameter_server.asynchronous.tensors import as_bytes, from_bytes
from lockstep.strategies.parameter_server.holding import Holding
from lockstep.strategy_options import ParameterServerOptions
from lockstep.world import host_name

logger = logging.getLogger(__name__)


class AsynchronousParameterServer(Strategy):
    """Shares micro-batches out over workers that need not keep step, and parameters over servers.

    Args:
        device: this rank's device.
        group: all ranks; the first ``options.servers`` of them are servers. It is left after ``prepare``.
        options: servers, staleness, snapshots.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
        patience: seconds that a message which was begun may take.

    Raises:
        ConfigError: no worker is left, or the ranks are on several hosts.
    """

    name = "parameter_server"
    level = Level.STATISTICAL
    replicated = False
    independent = True

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        options: ParameterServerOptions,
        running_buffers: Sequence[str] = (),
        patience: float = 600.0,
    ) -> None:
        ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        if options.servers >= ranks:
            raise ConfigError(
                f"parameter_server.servers={options.servers} leaves no worker among {ranks} processes. Use at most "
                f"{ranks - 1}."
            )
        hosts = {str(host) for host in gather_json(host_name(), group, device)}
        if len(hosts) > 1:
            raise ConfigError(
                f"parameter_server.mode='asynchronous' speaks over loopback, within one host, and the ranks are on "
                f"{len(hosts)}: {', '.join(sorted(hosts))}. Use one host, or mode='synchronous'."
            )
        self.device, self._group, self._options, self._patience = device, group, options, patience
        self._servers = list(range(options.servers))
        self._declared = running_buffers
        self._set_workers(list(range(options.servers, ranks)))
        self._optimizers = 0
        self._role: Role | None = None
        self.save_every = options.snapshot_every

    def place(self, model: nn.Module) -> nn.Module:
        """Spreads the parameters over the servers; every rank keeps the model."""
        self._model = model.to(self.device)
        self._buffers = RunningBuffers(self._model, self._declared)
        server = self._rank if self._rank in self._servers else -1
        self._holding = Holding(self._model, len(self._servers), server)
        return self._model

    def part_ways(self, step: int) -> None:
        """Connects workers with servers. Collective, the last one over the process group."""
        token = gather_json(secrets.token_hex(32), self._group, self.device)[0]
        self._role = open_role(
            self._group,
            bytes.fromhex(token),
            self._options,
            self._holding,
            self._model,
            (self._buffers, self._declared),
            self._patience,
            step,
        )
        dist.barrier(self._group)
        let_go_of_groups(self)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """A worker's part of a step, or a server's pushes of an update."""
        return self._connected.backward(batch, compute, scale=scale, stop=stop)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all workers that were there when their shares were given out; zeros of one that was lost since."""
        values = self._connected.meet("gather", row.tolist()).values
        found = {rank: value for rank, value in enumerate(values) if value is not None}
        if missing := [rank for rank in self._members if rank not in found]:
            logger.warning("What rank %s had of this result is lost with it.", ", ".join(map(str, missing)))
        rows = [found.get(rank, [0.0] * row.numel()) for rank in self._members]
        return torch.tensor(rows, dtype=row.dtype, device=row.device)

    def tally(self, row: Tensor) -> Tensor:
        """On the main process: what has come so far."""
        return self._connected.tally(row)

    def gather_records(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """The values of all that are there."""
        if self._role is None:
            return super().gather_records(value, group)
        return [each for each in self._role.meet("gather records", value).values if each is not None]

    def settle(self) -> None:
        """Gives everyone the servers' values, and shares the samples out over the workers that are there."""
        if self._role is not None:
            self._set_workers(self._role.meet("settle", None).living)
            self._role.fetch()

    def after_step(self) -> None:
        """Workers push and pull; servers give new values."""
        self._connected.after_step()

    def release(self) -> None:
        """See ``Strategy.release``."""
        if self._role is not None:
            role, self._role = self._role, None
            role.farewell()
        let_go_of_groups(self)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """A server's keys; none on a worker."""
        return self._holding.own

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizers that look at several elements at once, and more than one of them."""
        require_elementwise(optimizer, self.name)
        self._optimizers += 1
        if self._optimizers > 1:
            raise ConfigError(
                "parameter_server.mode='asynchronous' makes one update of what workers push, and run.prepare was given "
                "several optimizers. Put their parameters into groups of one, or use mode='synchronous'."
            )

    def gradients(self) -> Iterable[Tensor]:
        """The mean gradient of a worker's part: each worker clips its own."""
        return self._connected.gradients()

    def squares(self) -> Tensor:
        """Of ``gradients``; nothing is exchanged."""
        found = self._connected.squares()
        return torch.zeros(1, dtype=torch.float64, device=self.device) if found is None else found

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks that are there. Collective."""
        values = self._connected.meet("compare", flags.tolist()).values
        found = torch.tensor([each for each in values if each is not None], dtype=flags.dtype)
        return found.amax(0).to(flags.device)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's state, the same on every rank: nobody goes on before all have the servers' values."""
        self.settle()
        if self._role is not None:
            self._role.meet("state", None)
        yield from self._model.state_dict().items()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into the model's own tensors, on every rank."""
        given = OrderedDict(state)
        # Without the version metadata, torch would take every module's state for one of its oldest format.
        given._metadata = getattr(self._model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]  # torch's
        self._model.load_state_dict(given)

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.whole``; put together on the main process alone. Collective where servers are several."""
        holders = self._holding.holders(name)
        found = torch.zeros(self._holding.parameters[name].shape, dtype=dtype, device=self.device)
        if part is not None:
            own = self._holding.part(name, found)
            assert own is not None, f"this rank holds nothing of {name!r}"
            own.copy_(part)
        if [server for server, _ in holders] == [0]:
            return found
        body = b"" if part is None or self._rank == 0 else bytes(as_bytes(part.to(dtype)))
        bodies = self._connected.meet(f"put {name} together", None, body).bodies
        for server, key in holders:
            if server in bodies:
                rows = key.of(found)
                rows.copy_(from_bytes(bytearray(bodies[server]), dtype, self.device).view(rows.shape))
        return found

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """What this server holds: all of it, or the rows of a large one."""
        return self._holding.part(name, whole)

    def readings(self) -> dict[str, float]:
        """Staleness since the last call."""
        return self._connected.readings()

    def remarks(self) -> dict[str, str]:
        """Staleness over the run, and the workers that were lost."""
        return self._connected.remarks()

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that a worker has pushed, or of values that a server has given."""
        return self._role.bytes_sent if self._role is not None else 0

    @property
    def _connected(self) -> Role:
        assert self._role is not None, "run.prepare connects workers with servers"
        return self._role

    def _set_workers(self, members: list[int]) -> None:
        self._members = members
        holder = members.index(self._rank) if self._rank in members else None
        self.share = Share(holders=max(1, len(members)), holder=holder)
        self.is_spare = holder is not None
