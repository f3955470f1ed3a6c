"""The parameters of a sharded model: what is held here of each, and who uses it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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

    Args:
        parameters: by name.
        modules: those that gather parameters.
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
