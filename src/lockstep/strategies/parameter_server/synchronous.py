"""Parameter server, synchronous: workers push gradients, servers update, workers pull.

    worker 0   k0 k1 k2 k3 --push-->  server 0: keys a, c   sum -> clip -> update  --pull-->  worker 0
    worker 1   k4 k5 k6 k7 --push-->  server 1: key b       sum -> clip -> update  --pull-->  worker 1

The last ranks of the world are the servers. Workers push the tree nodes that they could finish alone, one flat tensor
per node and server; a server finishes the tree of its keys, so the sum has the same bits as on one device. A pull sends
the values of each server's keys to all ranks. Every rank runs the same loop; a server has no micro-batches, and a
worker's optimizer has no parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.strategy_options import Level
from lockstep.core.generators import encoded_states, set_encoded_states
from lockstep.core.plan import Share
from lockstep.core.summation_tree import Node, fold, fold_rows, nodes_within
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_gather_rows, all_reduce_max, exchange_device, gather_json
from lockstep.distributed.process_group import connect_pair
from lockstep.numerics.precision import all_finite
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.absent import Absence, GradientElsewhere, gradient_of
from lockstep.strategies.gradients import GradientTree, StepHeader, add_prior, aligned_gradient, run_backward
from lockstep.strategies.loop_writes import LoopWrites
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.parameter_server.shards import ParameterShards
from lockstep.strategies.strategy import Compute, StepResult, Strategy


class ParameterServer(Strategy):
    """Shares micro-batches out over workers, and parameters over servers.

    Args:
        group: all ranks; the last ``servers`` of them are servers.
    """

    name = "parameter_server"
    level = Level.BITWISE
    replicated = False
    replaces_parameters = True
    largest_unit = Unit.ELEMENT
    keeps_whole = True

    def __init__(self, device: torch.device, micro_batches: int, group: dist.ProcessGroup, servers: int) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.device, self._group, self._servers = device, group, servers
        self.model_group = group
        if servers == 1:
            self.largest_unit = Unit.MODEL
        self._ranks, workers = dist.get_process_group_ranks(group), ranks - servers
        self.share = Share(holders=workers, holder=rank if rank < workers else None)
        self._bytes_sent = 0
        self._micro_batches = micro_batches
        for worker in range(workers):
            for server in range(servers):
                connect_pair(self._ranks[worker], self._rank_of(server), group, device)

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Spreads the parameters over the servers; every rank keeps the model, the servers their keys. Collective."""
        self._model = model.to(self.device)
        self._buffers = RunningBuffers(self._model, self.running_buffers)
        server = dist.get_rank(self._group) - self.share.holders
        self._shards = ParameterShards(self._model, self._servers, server, self.whole_parameters, apart=True)
        self._names, self._own = list(self._shards.parameters), self._shards.own
        absence = Absence(self.name, "the servers share it" if self._servers > 1 else "the server has it")
        self.absences, self.writes = [absence], LoopWrites()
        self._given: set[str] = set()
        """The parameters that the last ``backward`` gave a gradient, until a step."""
        self._elsewhere = {
            name: GradientElsewhere(p, name, self._own.get(name), absence)
            for name, p in self._shards.parameters.items()
        }
        for key in self._shards.own_keys:
            self._elsewhere[key.name].part_of = key.of
        self._tree = GradientTree({} if self.share.holder is None else self._shards.parameters, None)
        self._header = StepHeader(self.share, self._micro_batches, len(self._names), self._buffers.counters, flags=1)
        return self._model

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Workers compute and push; servers add. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        self._shards.follow()
        self.before_step()
        kept = {name for name, parameter in self._shards.parameters.items() if parameter.grad is not None}
        for name in kept:
            self._shards.parameters[name].grad = None
        prior = [(p, p.grad) for p in self._own.values() if p.grad is not None]
        values = self._buffers.new_rows(self.share.longest(self._micro_batches))
        self._buffers.begin_step()
        self._buffers.remember_others()
        header = self._compute(batch, compute, scale, stop, values)
        compute.exchange()
        everyone = all_gather_rows(header, self._group)
        losses, weight, uses, advanced = self._header.unpack(everyone[: self.share.holders], leaves)
        used = self._used(uses)
        finite = self._set_gradients(leaves, used, weight.float(), prior)
        if self._buffers.numel:
            self._buffers.finish_step(fold_rows(self.gather_in_order(values, leaves)), leaves, advanced)
        self._given = used | kept
        for name in self._given:
            self._shards.parameters[name].grad = self._elsewhere[name]
        self._buffers.refuse_changed_others()
        finite &= losses.sum().isfinite()
        return StepResult(fold_rows(losses) / weight, losses, weight, self._header.flag(everyone), finite)

    def watched(self) -> Mapping[str, Tensor]:
        """See ``Strategy.watched``: all parameters, of which the next pull leaves nothing but the servers' values."""
        return dict(self._model.named_parameters())

    def gather(self, row: Tensor) -> Tensor:
        """Rows of all workers, shape (workers, n), on every rank. Collective."""
        return all_gather_rows(row, self._group)[: self.share.holders]

    def before_step(self) -> None:
        """See ``Strategy.before_step``: what the user has assigned with ``p.grad = ...`` becomes the server's."""
        for name in self._given:
            if self._shards.parameters[name].grad is None:
                self.absences[0].note_change(gradient_of(name))
        self._given = set()
        for key in self._shards.own_keys:
            gradient = self._shards.parameters[key.name].grad
            if gradient is None:
                self._own[key.name].grad = None
            elif gradient is not self._elsewhere[key.name]:
                self._own[key.name].grad = key.of(gradient.detach()).clone()
                self._shards.parameters[key.name].grad = self._elsewhere[key.name]

    def after_step(self) -> None:
        """Gives the servers' new values to all. Collective."""
        shards = self._shards
        for server, keys in enumerate(shards.keys):
            if not keys:
                continue
            flat = shards.flat(server, shards.parameters)
            dist.broadcast(flat, self._rank_of(server), self._group)
            if server == shards.server:
                self._bytes_sent += flat.nbytes * (len(self._ranks) - 1)
            else:
                shards.set_values(server, flat)
        if self.draws_in_step:  # there is one server, and what the loop draws next is the same on every rank
            own = encoded_states() if shards.server == 0 else None
            everyones = gather_json(own, self._group, self.device)
            set_encoded_states(next(each for each in everyones if each is not None))

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """A server's keys; none on a worker."""
        return self._own

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: each server squares its keys."""
        everyone = all_gather_rows(self._shards.squares(), self._group)
        return self._shards.folded(everyone.sum(0))  # of each entry, all but one are zero

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``: the servers that hold a parameter give their rows to all."""
        shards = self._shards
        found = torch.empty(shards.parameters[name].shape, dtype=dtype, device=shards.device)
        for server, key in shards.holders(name):
            rows = torch.empty(key.of(found).shape, dtype=dtype, device=shards.device)
            if server == shards.server and part is not None:
                rows.copy_(part)
            dist.broadcast(rows, self._rank_of(server), self._group)
            key.of(found).copy_(rows)
        return found

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """The part that this server holds: all of it, or the rows of a large one."""
        return self._shards.local_shard(name, whole)

    @property
    def all_bytes_sent(self) -> int:
        """Bytes of gradients that a worker has pushed, or of parameters that a server has given."""
        return self._bytes_sent

    def _compute(self, batch: Batch, compute: Compute, scale: float, stop: int, values: Tensor) -> Tensor:
        """A worker's micro-batches; gives its header, and a server's, which has none."""
        losses, weights = [], []
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self.device)
        if self.share.holder is None:
            return self._header.pack([], [], [0] * len(self._names), advanced, [stop])
        leaves = batch.plan.leaves
        mine = self.share.of(leaves)
        self._tree.begin(mine.start, mine.stop, leaves)
        for place, micro_batch in enumerate(batch.micro_batches):
            self._buffers.begin_micro_batch()
            loss, weight = compute(micro_batch)
            if self._buffers.numel:
                values[place], counts = self._buffers.take()
                advanced += counts
            run_backward(loss, scale)
            self._tree.end_micro_batch()
            losses.append(loss.detach())
            weights.append(weight)
            for call in self.events.micro_batch_end:
                call(micro_batch)
        return self._header.pack(losses, weights, self._tree.used(), advanced, [stop])

    def _used(self, uses: Tensor) -> set[str]:
        """The parameters that a worker has used. Collective, so that no host waits for a GPU to read it."""
        if exchange_device(self._group, self.device) != self.device:
            mine = self._tree.used() or [0] * len(self._names)
            uses = all_reduce_max(torch.tensor(mine), self._group)
        return {name for name, count in zip(self._names, uses.tolist()) if count}

    def _push(self, leaves: int) -> None:
        """Sends this worker's tree nodes to the servers, who wait for them now."""
        mine, pending = self.share.of(leaves), []
        stacks = {slot.name: slot.stack for slot in self._tree.slots}
        for server, keys in enumerate(self._shards.keys):
            for number in range(len(nodes_within(mine.start, mine.stop, leaves)) if keys else 0):
                flat = self._shards.flat(server, {key.name: stacks[key.name][number] for key in keys})
                pending.append((dist.isend(flat, self._rank_of(server), self._group), flat))
                self._bytes_sent += flat.nbytes
        for work, _ in pending:
            if work is not None:
                work.wait()
        self._tree.end()

    def _receive(self, leaves: int) -> list[tuple[Node, Tensor]]:
        """The nodes of all workers for this server's keys, flat."""
        shards, found = self._shards, []
        for worker in range(self.share.holders):
            part = self.share.of(leaves, worker)
            for node in nodes_within(part.start, part.stop, leaves):
                flat = torch.empty(shards.numel(shards.server), dtype=shards.dtype, device=shards.device)
                dist.recv(flat, self._ranks[worker], self._group)
                found.append((node, flat))
        return found

    def _set_gradients(
        self, leaves: int, used: set[str], weight: Tensor, prior: list[tuple[nn.Parameter, Tensor]]
    ) -> Tensor:
        """Adds what the workers push for each server's keys; whether all gradients of all servers are finite."""
        flag = torch.zeros(1, dtype=torch.float64, device=self.device)
        if self.share.holder is not None:
            self._push(leaves)
        if self._own:
            total = fold(self._receive(leaves), leaves, lambda left, right: left.add_(right)).div_(weight)
            flag[0] = all_finite([total], self.device).logical_not()
            for name, gradient in self._shards.views(total).items():
                self._own[name].grad = aligned_gradient(gradient) if name in used else None
            add_prior(prior)
        return self.all_reduce_max(flag)[0] == 0

    def _rank_of(self, server: int) -> int:
        """The global rank of a server."""
        return self._ranks[self.share.holders + server]
