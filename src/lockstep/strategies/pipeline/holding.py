"""Which rank of a pipeline holds which tensor of the whole model, and how it is given to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.wiring import Wiring
from lockstep.sums import sum_of_squares


class Holding:
    """The tensors of a whole model by name, each with the place of the rank that keeps it.

    Args:
        model: the whole model, before it is taken apart.
        parts: the modules of each stage.
        mine: numbers of this rank's stages.
        wiring: the ranks of the pipeline.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[Sequence[nn.Module]], mine: range, wiring: Wiring
    ) -> None:
        self._wiring = wiring
        stage_of = {
            id(tensor): number
            for number, modules in enumerate(parts)
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        state = model.state_dict(keep_vars=True)
        self._keeper = {name: stage_of[id(tensor)] % wiring.length for name, tensor in state.items()}
        self._forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        self._trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
        self._others = [module for n, modules in enumerate(parts) if n not in mine for module in modules]
        self._held: dict[str, Tensor] = {}

    def keep(self, stages: Sequence[nn.Module]) -> None:
        """Notes what is held here, in stages on their device, and gives the memory of all other stages back."""
        self._held = {
            name: tensor.detach()
            for stage in stages
            for name, tensor in stage.state_dict(keep_vars=True).items()
        }
        for module in self._others:
            module.to("meta")
        self._others = []

    def is_mine(self, name: str) -> bool:
        """Whether a parameter or buffer is held here."""
        return self._keeper[name] == self._wiring.place

    def state(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the whole model in turn, on every rank. Collective over the pipeline."""
        for name, form in self._forms.items():
            yield name, self.give(name, self._held.get(name), form.dtype, device)

    def own_rows(self, holder: int) -> dict[str, Tensor]:
        """What one of the ranks that hold the same stages writes of them to a checkpoint.

        Args:
            holder: number of the rank among these.
        """
        return dict(self._held) if holder == 0 else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values of what is held here from whole tensors."""
        with torch.no_grad():
            for name, tensor in self._held.items():
                tensor.copy_(state[name])

    def give(self, name: str, part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that is held as the parameter ``name`` is, on every rank. Collective over the pipeline."""
        if self.is_mine(name):
            if part is None:
                raise ConfigError(
                    f"The stage of {name!r} has no tensor for it to give. Report this as a fault."
                )
            packed = part.detach().contiguous()
        else:
            packed = torch.empty(self._forms[name].shape, dtype=dtype, device=device)
        dist.broadcast(packed, self._wiring.ranks[self._keeper[name]], group=self._wiring.group)
        return part.detach() if self.is_mine(name) and part is not None else packed

    def squares(self, trainable: Mapping[str, nn.Parameter], device: torch.device) -> Tensor:
        """The sum of squares of each trained parameter's gradient, zero for those of others. float64, in name order."""
        found = [
            sum_of_squares(trainable[name].grad)  # type: ignore[arg-type]  # asked in the same line
            if name in trainable and trainable[name].grad is not None
            else None
            for name in self._trained
        ]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([zero if each is None else each for each in found] or [zero])
