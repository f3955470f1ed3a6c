"""Parameter server, synchronous: workers push gradients, servers update, workers pull.

    worker 0   k0 k1 k2 k3 --push-->  server 0: keys a, c   sum -> clip -> update  --pull-->  worker 0
    worker 1   k4 k5 k6 k7 --push-->  server 1: key b       sum -> clip -> update  --pull-->  worker 1

The last ranks of the world are the servers. Workers push the tree nodes that they could finish alone, and a server
finishes the tree of its keys, so the sum has the same bits as on one device. Every rank runs the same loop; a server
has no micro-batches, and a worker's optimizer has no parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers
from lockstep.collectives import all_gather_flat, let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.strategies.contract import Compute, StepResult, Strategy
from lockstep.strategies.elementwise import require_elementwise
from lockstep.strategies.gradients import GradientTree
from lockstep.strategies.parameter_server.holding import Holding
from lockstep.strategies.parameter_server.store import Store
from lockstep.sums import fold_rows
from lockstep.tree import TreeStack, fold, nodes_within


class ParameterServer(Strategy):
    """Shares micro-batches out over workers, and parameters over servers.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        group: all ranks; the last ``servers`` of them are servers.
        servers: how many.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "parameter_server"
    level = Level.BITWISE
    replicated = False

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        group: dist.ProcessGroup,
        servers: int,
        running_buffers: Sequence[str] = (),
    ) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if servers >= ranks:
            raise ConfigError(
                f"parameter_server.servers={servers} leaves no worker among {ranks} processes. Use at most {ranks - 1}."
            )
        self.device, self._group, self._servers = device, group, servers
        workers = ranks - servers
        self.share = Share(holders=workers, holder=rank if rank < workers else None)
        self._longest = self.share.longest(micro_batches)
        self._declared, self._checked = running_buffers, False

    def place(self, model: nn.Module) -> nn.Module:
        """Spreads the parameters over the servers; every rank keeps the model, the servers their keys. Collective."""
        self._model = model.to(self.device)
        self._buffers = RunningBuffers(self._model, self._declared)
        server = dist.get_rank(self._group) - self.share.holders
        self._holding = Holding(self._model, self._servers, server)
        self._names, self._own = list(self._holding.parameters), self._holding.own
        self._store = Store(self._group, self._holding)
        self._tree = GradientTree({} if self.share.holder is None else self._holding.parameters, None)
        return self._model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Workers compute and push; servers add. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        prior = [(p, p.grad) for p in self._own.values() if p.grad is not None]
        header = torch.zeros(self._header_size, dtype=torch.float64, device=self.device)
        values = torch.zeros(
            self._longest, self._buffers.numel, dtype=self._buffers.dtype, device=self.device
        )
        self._buffers.begin_step()
        if not self._checked:
            self._buffers.remember_others()
        self._compute(batch, compute, scale, header, values)
        header[-1] = float(stop)
        headers = self._gather_all(header)[: self.share.holders]
        stops = self._gather_all(header[-1:]).max()
        losses, weights = (self._in_order(headers, leaves, start) for start in (0, self._longest))
        weight = fold_rows(weights)
        uses = headers[:, 2 * self._longest : self._counters.start].sum(0).tolist()
        finite = self._set_gradients(leaves, uses, weight.float(), prior)
        self._set_buffers(headers, values, leaves)
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        return StepResult(fold_rows(losses) / weight, losses, stops, losses.sum().isfinite() & finite)

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all workers, shape (workers, n), on every rank. Collective."""
        return self._gather_all(row)[: self.share.holders]

    def after_step(self) -> None:
        """Gives the servers' new values to all. Collective."""
        self._store.pull()

    def release(self) -> None:
        """See ``Strategy.release``."""
        let_go_of_groups(self, self._store)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """A server's keys; none on a worker."""
        return self._own

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizers that look at several parameters at once, which may be on different servers."""
        require_elementwise(optimizer, self.name)

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: each server squares its keys."""
        everyone = self._gather_all(self._holding.squares())
        return self._holding.folded(everyone.sum(0))  # of each entry, all but one are zero

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the ranks. Collective."""
        found = flags.clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's state, which every rank has after a pull."""
        yield from self._model.state_dict().items()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into the model's own tensors, on every rank."""
        given = OrderedDict(state)
        # Without the version metadata, torch would take every module's state for one of its oldest format.
        given._metadata = getattr(self._model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]  # torch's
        self._model.load_state_dict(given)

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.whole``: the servers that hold a parameter give their rows to all."""
        return self._store.whole(name, part, dtype)

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """What this server holds: all of it, or the rows of a large one."""
        return self._holding.part(name, whole)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that a worker has pushed, or of parameters that a server has given."""
        return self._store.bytes_sent

    @property
    def _counters(self) -> slice:
        start = 2 * self._longest + len(self._names)
        return slice(start, start + self._buffers.counters)

    @property
    def _header_size(self) -> int:
        """[losses, weights] of this worker's micro-batches, uses of parameters, advances of counters, stop."""
        return 2 * self._longest + len(self._names) + self._buffers.counters + 1

    def _compute(self, batch: Batch, compute: Compute, scale: float, header: Tensor, values: Tensor) -> None:
        """A worker's micro-batches."""
        if self.share.holder is None:
            return
        leaves = batch.plan.leaves
        mine = self.share.of(leaves)
        self._tree.begin(mine.start, mine.stop, leaves)
        for place, micro_batch in enumerate(batch.micro_batches):
            self._buffers.begin_micro_batch()
            loss, weight = compute(micro_batch)
            if self._buffers.numel:
                values[place], advanced = self._buffers.take()
                header[self._counters] += advanced
            (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub
            self._tree.end_micro_batch()
            header[place], header[self._longest + place] = loss.detach(), weight
        uses = torch.tensor(self._tree.used(), dtype=torch.float64)
        header[2 * self._longest : self._counters.start] = uses.to(self.device)

    def _push(self, leaves: int) -> None:
        """Sends this worker's tree nodes to the servers, who wait for them now."""
        mine = self.share.of(leaves)
        stacks = {slot.name: slot.stack for slot in self._tree.slots}
        self._store.push(stacks, len(nodes_within(mine.start, mine.stop, leaves)))
        for slot in self._tree.slots:
            slot.stack = []

    def _set_gradients(
        self, leaves: int, uses: list[float], weight: Tensor, prior: list[tuple[nn.Parameter, Tensor]]
    ) -> Tensor:
        """Adds what the workers push for each server's keys; whether all gradients of all servers are finite."""
        flag = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self.share.holder is not None:
            self._push(leaves)
        if self._own:
            shares = (self.share.of(leaves, worker) for worker in range(self.share.holders))
            nodes = [nodes_within(part.start, part.stop, leaves) for part in shares]
            received = self._store.receive(nodes)
            total = fold(received, leaves, lambda left, right: left.add_(right)).div_(weight)
            flag[0] = float(not bool(total.sum().isfinite()))
            used = dict(zip(self._names, uses))
            for name, gradient in self._holding.views(total).items():
                self._own[name].grad = gradient if used[name] else None
            for parameter, before in prior:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        return self.any_rank(flag)[0] == 0

    def _set_buffers(self, headers: Tensor, values: Tensor, leaves: int) -> None:
        if not self._buffers.numel:
            return
        rows = self._gather_all(values.view(-1)).view(-1, *values.shape)
        stack = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        for worker in range(self.share.holders):
            for place, k in enumerate(self.share.of(leaves, worker)):
                stack.push_leaf(k, rows[worker, place])
        (total,) = stack.take().values()
        self._buffers.finish_step(total, leaves, headers[:, self._counters].sum(0))

    def _in_order(self, headers: Tensor, leaves: int, start: int) -> Tensor:
        """The entries of all micro-batches, in order of k, from the workers' columns that begin at ``start``."""
        sizes = [len(self.share.of(leaves, worker)) for worker in range(self.share.holders)]
        return torch.cat([row[start : start + size] for row, size in zip(headers, sizes)])

    def _gather_all(self, row: Tensor) -> Tensor:
        rows = torch.empty(dist.get_world_size(self._group), row.numel(), dtype=row.dtype, device=row.device)
        all_gather_flat(rows.view(-1), row.contiguous(), self._group)
        return rows
