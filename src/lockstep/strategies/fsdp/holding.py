"""The state of a sharded model: whole for all to see, and this rank's rows of what is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.strategies.fsdp.parameters import ShardedParameter
from lockstep.strategies.rows import gather_rows, rows_of, squares_of_rows


class Holding:
    """Names and shapes of a whole model, and what this rank holds of it once it is sharded.

    Args:
        model: before it is sharded.
        group: the ranks.
        device: of this rank.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._model, self._group, self._device = model, group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        entries = model.state_dict(keep_vars=True).items()
        self._state_names = [(name, isinstance(value, nn.Parameter)) for name, value in entries]
        first = {parameter: name for name, parameter in model.named_parameters()}
        self._first = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.parameters: dict[str, ShardedParameter] = {}

    def find(self) -> dict[str, ShardedParameter]:
        """The parameters of the model, which is sharded by now, by their first names."""
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            self.parameters[name] = ShardedParameter(name, parameter, self._shapes[name])
        return self.parameters

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: every rank squares its rows, and all fold the rows of each parameter alike."""
        trained = sorted(name for name, each in self.parameters.items() if each.sharded.requires_grad)
        gradients = [self.parameters[name].held.grad for name in trained]
        rows = [self._shapes[name][0] for name in trained]
        sums = squares_of_rows(gradients, rows, self._device, self._group)
        return torch.stack(sums or [torch.zeros((), dtype=torch.float64, device=self._device)])

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, gathered one at a time, and buffers. Collective."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for name, is_parameter in self._state_names:
            if is_parameter:
                first = self._first[name]
                yield name, self.whole(first, self.parameters[first].held.detach())
            else:
                yield name, buffers[name]

    def own_rows(self) -> dict[str, Tensor]:
        """This rank's rows of each parameter where it has some; what has none at all, and buffers, on rank 0."""
        first = self._rank == 0
        found = {n: p.held.detach() for n, p in self.parameters.items() if first or p.held.numel()}
        buffers = dict(self._model.named_buffers(remove_duplicate=False)) if first else {}
        return found | {name: buffers[name] for name, _ in self._state_names if name in buffers}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows, and all buffers."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, is_parameter in self._state_names:
                if is_parameter:
                    self.parameters[self._first[name]].held.copy_(self.part(state[name]))
                else:
                    buffers[name].copy_(state[name])

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor that is held as the parameter ``name`` is. Collective."""
        return gather_rows(part.to(self._device), self._shapes[name], self._group)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return whole[rows_of(whole.shape[0], self._ranks, self._rank)]
