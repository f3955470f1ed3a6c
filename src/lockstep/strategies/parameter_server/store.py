"""The key-value store between workers and servers: push gradients, pull parameters.

    push   every worker sends each server the tree nodes of that server's keys, one flat tensor for each node
    pull   each server sends the values of its keys to all

Values travel as they are, so nothing but who holds a key depends on the number of servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.tree import Node


class Store:
    """One rank's end of the store.

    Args:
        group: all ranks, the servers last.
        keys: names of each server's keys.
        parameters: of the whole model, by name; all of one number type.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        keys: Sequence[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        types = {parameter.dtype for parameter in parameters.values()}
        if len(types) > 1:
            raise ConfigError(
                f"Strategy 'parameter_server' stores values of one number type, and the model has {len(types)}: "
                f"{', '.join(sorted(map(str, types)))}. Convert the model, or use strategy 'ddp'."
            )
        self._group, self._keys, self._parameters = group, keys, parameters
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        self.workers = len(self._ranks) - len(keys)
        self.server = self._rank - self.workers
        """This rank's number among the servers; negative for a worker."""
        self._sizes = [sum(parameters[name].numel() for name in each) for each in keys]
        self._dtype, self._device = _kind(parameters)
        self.bytes_sent = 0

    @property
    def own(self) -> Sequence[str]:
        """The keys of this server; none on a worker."""
        return self._keys[self.server] if self.server >= 0 else ()

    def push(self, stacks: Mapping[str, Sequence[Tensor]], nodes: int) -> None:
        """Sends this worker's tree nodes to the servers. The servers call ``receive``.

        Args:
            stacks: the nodes of each key, left to right.
            nodes: how many there are.
        """
        pending: list[tuple[dist.Work | None, Tensor]] = []
        for server, names in enumerate(self._keys):
            for number in range(nodes if names else 0):
                flat = torch.cat([stacks[name][number].reshape(-1) for name in names])
                pending.append((dist.isend(flat, self._ranks[self.workers + server], self._group), flat))
                self.bytes_sent += flat.nbytes
        for work, _ in pending:
            if work is not None:
                work.wait()

    def receive(self, nodes: Sequence[Sequence[Node]]) -> list[tuple[Node, Tensor]]:
        """The nodes of all workers for this server's keys, flat.

        Args:
            nodes: of each worker, left to right.
        """
        found = []
        for worker, own in enumerate(nodes):
            for node in own if self.own else ():
                flat = torch.empty(self._sizes[self.server], dtype=self._dtype, device=self._device)
                dist.recv(flat, self._ranks[worker], self._group)
                found.append((node, flat))
        return found

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A server's flat tensor, key by key."""
        shapes = [self._parameters[name].shape for name in self.own]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.own, parts, shapes)}

    def pull(self) -> None:
        """Gives every rank the values that the servers hold. Collective."""
        with torch.no_grad():
            for server, names in enumerate(self._keys):
                if not names:
                    continue
                held = [self._parameters[name] for name in names]
                flat = torch.cat([each.detach().reshape(-1) for each in held])
                dist.broadcast(flat, self._ranks[self.workers + server], self._group)
                if server == self.server:
                    self.bytes_sent += flat.nbytes * (len(self._ranks) - 1)
                    continue
                for parameter, part in zip(held, torch.split(flat, [each.numel() for each in held])):
                    parameter.copy_(part.view(parameter.shape))

    def owner(self, name: str) -> int:
        """The global rank of the server that holds a key."""
        server = next(number for number, names in enumerate(self._keys) if name in names)
        return self._ranks[self.workers + server]


def _kind(parameters: Mapping[str, nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    first = next(iter(parameters.values()))
    return first.dtype, first.device
