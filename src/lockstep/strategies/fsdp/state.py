"""The parameters of a sharded model: this rank's rows, how often each was used, and the full state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.strategies.sharding import gather_rows, rows_of, squares_of_rows


class ShardedParameter:
    """One parameter.

    Args:
        name: its first name in the whole model.
        sharded: FSDP2's; its rows of this rank are never moved.
        shape: of the whole.
    """

    def __init__(self, name: str, sharded: DTensor, shape: torch.Size) -> None:
        self.name, self.sharded, self.shape = name, sharded, shape
        rows = sharded.detach().to_local()  # type: ignore[attr-defined]  # a DTensor
        self.held = nn.Parameter(rows, requires_grad=sharded.requires_grad)
        """An ordinary parameter on the very memory of this rank's rows: optimizers step it without DTensor."""
        self.place: tuple[int, int] | None = None
        """Number of its exchange, and where in the flat sum it begins; known after the first backward pass."""
        self.used = 0
        """In how many of the step's micro-batches of this rank it had a gradient."""

    def view(self, total: Tensor) -> Tensor:
        """This rank's rows of the gradient in the flat sum of its exchange."""
        assert self.place is not None
        start = self.place[1]
        return total[start : start + self.held.numel()].view(self.held.shape)


class UseCounter:
    """Counts in which micro-batches parameters had a gradient.

    FSDP2 makes the whole parameters at the first forward pass and keeps the objects, so they get a hook then.
    """

    def __init__(self, parameters: Mapping[str, ShardedParameter], modules: Mapping[str, FSDPModule]) -> None:
        self._waiting = {name for name, p in parameters.items() if p.sharded.requires_grad}
        self._parameters = parameters
        for prefix, module in modules.items():
            assert isinstance(module, nn.Module)

            def hook(unit: nn.Module, arguments: object, prefix: str = prefix) -> None:
                if self._waiting:
                    self._watch(prefix, unit)

            module.register_forward_pre_hook(hook)  # after FSDP2's own, which gathers

    def _watch(self, prefix: str, unit: nn.Module) -> None:
        for name, parameter in unit.named_parameters(prefix):
            if name in self._waiting and not isinstance(parameter, DTensor):
                self._waiting.discard(name)
                sharded = self._parameters[name]

                def count(_: Tensor, sharded: ShardedParameter = sharded) -> None:
                    sharded.used += 1

                parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]  # torch's stub


class ShardedParameters:
    """Names and shapes of a whole model, and what this rank holds of it once it is sharded."""

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
                yield name, self.gather_full(first, self.parameters[first].held.detach())
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
                    self.parameters[self._first[name]].held.copy_(self.local_shard(state[name]))
                else:
                    buffers[name].copy_(state[name])

    def gather_full(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor that is held as the parameter ``name`` is. Collective."""
        return gather_rows(part.to(self._device), self._shapes[name], self._group)

    def local_shard(self, whole: Tensor) -> Tensor:
        """This rank's rows."""
        return whole[rows_of(whole.shape[0], self._ranks, self._rank)]
