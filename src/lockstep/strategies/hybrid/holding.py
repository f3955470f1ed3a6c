"""Which rank of a pipeline of sharded stages holds which rows of which tensor of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.pipeline.holding import Holding
from lockstep.strategies.pipeline.wiring import Wiring
from lockstep.strategies.rows import gather_rows, rows_of, squares_of_rows


class ShardedHolding(Holding):
    """The tensors of a whole model: buffers as in a pipeline, of each parameter this rank's rows.

    Args:
        model: the whole model, before it is taken apart.
        parts: the modules of each stage.
        mine: numbers of this rank's stages.
        wiring: the ranks of the pipeline.
        group: the ranks that hold rows of the same stages.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Sequence[nn.Module]],
        mine: range,
        wiring: Wiring,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(model, parts, mine, wiring)
        self._group = group
        self._shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def give(self, name: str, part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ``Holding.give``; the rows of a stage's ranks are put together first. Collective over all ranks."""
        if self.is_mine(name) and name in self._shared and part is not None:
            part = gather_rows(part.detach().to(device), self._forms[name].shape, self._group)
        return super().give(name, part, dtype, device)

    def own_rows(self, holder: int) -> dict[str, Tensor]:
        """See ``Holding.own_rows``; each of the ranks writes its rows of parameters."""
        return {n: t for n, t in self._held.items() if holder == 0 or (n in self._shared and t.numel())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies what is held here from whole tensors."""
        super().load({name: self.part(name, state[name]) for name in self._held})

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that belongs to a parameter; a buffer as it is."""
        if name not in self._shared:
            return whole
        return whole[rows_of(whole.shape[0], dist.get_world_size(self._group), dist.get_rank(self._group))]

    def squares(self, trainable: Mapping[str, nn.Parameter], device: torch.device) -> Tensor:
        """See ``Holding.squares``. Collective over the ranks of a stage."""
        mine = [name for name in self._trained if name in trainable]
        gradients = [trainable[name].grad for name in mine]
        rows = [self._forms[name].shape[0] for name in mine]
        sums = dict(zip(mine, squares_of_rows(gradients, rows, device, self._group)))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([sums.get(name, zero) for name in self._trained] or [zero])
