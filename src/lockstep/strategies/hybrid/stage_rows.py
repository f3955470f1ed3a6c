"""The parameters of one stage: this rank's rows between steps, whole while the stage computes.

    between steps      the modules have this rank's rows, the very parameters that the optimizer holds
    gather             memory for the whole ones -> rows of all ranks, a few MB at a time -> into the modules
    free               the rows go back into the modules, the memory of the whole ones is given back

The whole parameters stay the same objects, so hooks on them last; only their memory comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from lockstep.collectives import all_gather_flat
from lockstep.strategies.rows import rows_of

_BUCKET_BYTES = 8 << 20
"""About so much is gathered at once."""


@dataclass(frozen=True, eq=False)
class _Parameter:
    """A parameter of a stage, and the modules' dictionaries that hold it."""

    whole: nn.Parameter
    held: nn.Parameter
    most: int
    """The most rows of any rank."""
    users: list[tuple[nn.Module, str]]

    @property
    def padded(self) -> int:
        """Numbers that each rank gives to the others: as many as the one with the most rows."""
        return self.most * prod(self.whole.shape[1:])

    def put(self, parameter: nn.Parameter) -> None:
        """Makes the modules use ``whole`` or ``held``."""
        for module, key in self.users:
            setattr(module, key, parameter)


class StageRows:
    """Shares the parameters of a stage out over the ranks of a group; they are whole after this, until ``free``.

    Args:
        stage: the modules, on their device.
        group: the ranks that hold rows of this stage.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        names = {parameter: name for name, parameter in stage.named_parameters()}
        users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in stage.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    users.setdefault(parameter, []).append((module, key))
        self._parameters = {names[p]: self._share_out(p, places) for p, places in users.items()}
        self._buckets = _buckets(self._parameters.values())
        for each in self._parameters.values():
            each.put(each.whole)

    @property
    def held(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of every parameter by its first name, as ordinary parameters."""
        return {name: each.held for name, each in self._parameters.items()}

    def gather(self) -> None:
        """Makes the parameters whole. Collective: every rank of the group must call this."""
        for bucket in self._buckets:
            self._gather(bucket)
        for each in self._parameters.values():
            each.put(each.whole)

    def free(self) -> None:
        """Puts this rank's rows in place of the whole parameters and gives their memory back."""
        for each in self._parameters.values():
            each.put(each.held)
            each.whole.grad = None
            each.whole.untyped_storage().resize_(0)

    def _share_out(self, parameter: nn.Parameter, users: list[tuple[nn.Module, str]]) -> _Parameter:
        rows = rows_of(parameter.shape[0], self._ranks, dist.get_rank(self._group))
        trained = parameter.requires_grad
        values = parameter.detach()
        # Copies: the user may still look at the parameter that the model had.
        return _Parameter(
            nn.Parameter(values.clone(), requires_grad=trained),
            nn.Parameter(values[rows].clone(), requires_grad=trained),
            -(-parameter.shape[0] // self._ranks),
            users,
        )

    def _gather(self, bucket: list[_Parameter]) -> None:
        sizes = [each.padded for each in bucket]
        mine = bucket[0].held.new_zeros(sum(sizes), requires_grad=False)
        for each, part in zip(bucket, torch.split(mine, sizes)):
            part[: each.held.numel()] = each.held.detach().view(-1)
        everyone = mine.new_empty(self._ranks, mine.numel())
        all_gather_flat(everyone.view(-1), mine, self._group)
        for each, parts in zip(bucket, torch.split(everyone, sizes, dim=1)):
            storage, shape = each.whole.untyped_storage(), each.whole.shape
            storage.resize_(each.whole.numel() * each.whole.element_size())
            rows = parts.reshape(-1, *shape[1:])[: shape[0]]
            each.whole.detach().copy_(rows)


def _buckets(parameters: Iterable[_Parameter]) -> list[list[_Parameter]]:
    """The parameters in groups that are gathered at once: of one type, and up to a few MB."""
    found: list[list[_Parameter]] = []
    size = 0
    for each in parameters:
        size += each.whole.nbytes
        if not found or size > _BUCKET_BYTES or found[-1][0].whole.dtype != each.whole.dtype:
            found.append([])
            size = each.whole.nbytes
        found[-1].append(each)
    return found
