"""The key-value store between workers and servers: push gradients, pull parameters.

    push   every worker sends each server the tree nodes of that server's keys, one flat tensor for each node
    pull   each server sends the values of its keys to all

Values travel as they are, so nothing but who holds a key depends on the number of servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.parameter_server.holding import Holding
from lockstep.tree import Node


class Store:
    """One rank's end of the store.

    Args:
        group: all ranks, the servers last.
        holding: which server holds what.
    """

    def __init__(self, group: dist.ProcessGroup, holding: Holding) -> None:
        self._group, self._holding = group, holding
        self._ranks = dist.get_process_group_ranks(group)
        self._workers = len(self._ranks) - len(holding.keys)
        self.bytes_sent = 0

    def push(self, stacks: Mapping[str, Sequence[Tensor]], nodes: int) -> None:
        """Sends this worker's tree nodes to the servers. The servers call ``receive``.

        Args:
            stacks: the nodes of each parameter, left to right.
            nodes: how many there are.
        """
        pending: list[tuple[dist.Work | None, Tensor]] = []
        for server, keys in enumerate(self._holding.keys):
            for number in range(nodes if keys else 0):
                flat = self._holding.flat(server, {key.name: stacks[key.name][number] for key in keys})
                pending.append((dist.isend(flat, self.rank_of(server), self._group), flat))
                self.bytes_sent += flat.nbytes
        for work, _ in pending:
            if work is not None:
                work.wait()

    def receive(self, nodes: Sequence[Sequence[Node]]) -> list[tuple[Node, Tensor]]:
        """The nodes of all workers for this server's keys, flat.

        Args:
            nodes: of each worker, left to right.
        """
        holding, found = self._holding, []
        for worker, own in enumerate(nodes):
            for node in own if holding.own else ():
                flat = torch.empty(holding.numel(holding.server), dtype=holding.dtype, device=holding.device)
                dist.recv(flat, self._ranks[worker], self._group)
                found.append((node, flat))
        return found

    def pull(self) -> None:
        """Gives every rank the values that the servers hold. Collective."""
        holding = self._holding
        for server, keys in enumerate(holding.keys):
            if not keys:
                continue
            flat = holding.flat(server, holding.parameters)
            dist.broadcast(flat, self.rank_of(server), self._group)
            if server == holding.server:
                self.bytes_sent += flat.nbytes * (len(self._ranks) - 1)
            else:
                holding.set_values(server, flat)

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A tensor that is held as a parameter is, on every rank. Collective; see ``Strategy.whole``."""
        holding = self._holding
        found = torch.empty(holding.parameters[name].shape, dtype=dtype, device=holding.device)
        for server, key in holding.holders(name):
            rows = torch.empty(key.of(found).shape, dtype=dtype, device=holding.device)
            if server == holding.server and part is not None:
                rows.copy_(part)
            dist.broadcast(rows, self.rank_of(server), self._group)
            key.of(found).copy_(rows)
        return found

    def rank_of(self, server: int) -> int:
        """The global rank of a server."""
        return self._ranks[self._workers + server]
