"""The state of a run by name, whole, however it is held: gathered for a checkpoint, shared out when one is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoint import optimizer_state
from lockstep.checkpoint.encoding import JSON
from lockstep.errors import CheckpointError, ConfigError
from lockstep.strategies import Strategy

Record = dict[str, JSON]
_MOST_NUMBERS = 4096
"""Of a state tensor that is not shaped like its parameter, such as a step counter."""


@dataclass(frozen=True)
class SharedOptimizer:
    """The state of an optimizer whose parameters are shared out over processes."""

    parts: dict[str, Tensor]
    """What this process holds of the state tensors that are shaped like their parameters, by key."""
    dtypes: dict[str, str]
    """Of all state tensors that are shaped like their parameters, in the order of their keys."""
    others: dict[str, Tensor]
    """All other tensors, such as step counters, on every process."""
    record: Record
    """As ``checkpoint.optimizer_state`` gives it of the whole."""

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        names: Mapping[Tensor, str],
        members: Sequence[Sequence[str]],
        strategy: Strategy,
        group: dist.ProcessGroup | None,
    ) -> SharedOptimizer:
        """Learns of all state by name. Collective.

        Args:
            optimizer: this process's.
            names: of what it holds.
            members: names of the parameters of each of its groups in the whole model.
            strategy: knows who holds what.
            group: all ranks.
        """
        tensors, record = optimizer_state(optimizer, names)
        shapes = {names[p]: p.shape for each in optimizer.param_groups for p in each["params"]}
        mine: dict[str, Any] = {"state": record["state"], "dtypes": {}, "values": {}}
        for key, tensor in tensors.items():
            name = key.partition("|")[0]
            if name in shapes and tensor.shape == shapes[name]:
                mine["dtypes"][key] = str(tensor.dtype)
            elif name:
                mine["values"][key] = _as_json(key, tensor)
        everyone = strategy.gather_records(mine, group)
        others = {key: tensor.clone() for key, tensor in tensors.items() if not key.partition("|")[0]}
        others |= {key: _from_json(value) for key, value in _union(everyone, "values").items()}
        groups = record["groups"]
        assert isinstance(groups, list)
        whole_groups: list[JSON] = [
            {**each, "parameters": list(own)} for each, own in zip(groups, members) if isinstance(each, dict)
        ]
        return cls(
            {key: tensors[key] for key in mine["dtypes"]},
            _union(everyone, "dtypes"),
            others,
            {**record, "groups": whole_groups, "state": _union(everyone, "state")},
        )

    def gathered(self, strategy: Strategy, *, keep: bool) -> dict[str, Tensor]:
        """All tensors, whole, on the CPU, where this process keeps them. Collective."""
        whole = dict(self.others)
        for key, dtype in self.dtypes.items():
            found = strategy.whole(key.partition("|")[0], self.parts.get(key), _dtype(dtype))
            if keep:
                whole[key] = found.detach().to("cpu", copy=True)
        return whole

    def own(self, names: Collection[str]) -> dict[str, Tensor]:
        """What this process holds of the state of the named parameters."""
        return {key: part for key, part in self.parts.items() if key.partition("|")[0] in names}


def share_out(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], strategy: Strategy
) -> dict[str, Tensor]:
    """What is held here of an optimizer's whole state tensors.

    Args:
        tensors: as ``"<parameter name>|<state key>"``.
        shapes: of the whole model's parameters.
        strategy: knows who holds what.
    """
    held: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.partition("|")[0]
        part = strategy.part(name, tensor) if shapes.get(name) == tensor.shape else tensor
        if part is not None:
            held[key] = part
    return held


def require_elements(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises ``CheckpointError`` where state of an elementwise optimizer is neither a number nor as its parameter is.

    Args:
        tensors: as ``"<parameter name>|<state key>"``.
        shapes: of the whole model's parameters.
    """
    for key, tensor in tensors.items():
        wanted = shapes.get(key.partition("|")[0])
        if wanted is not None and tensor.numel() != 1 and tensor.shape != wanted:
            raise CheckpointError(
                f"The checkpoint's optimizer state {key!r} has the shape {list(tensor.shape)} and its parameter "
                f"{list(wanted)}. Use another checkpoint."
            )


def _union(everyone: list[Any], kind: str) -> dict[str, Any]:
    return dict(sorted({key: value for each in everyone for key, value in each[kind].items()}.items()))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _as_json(key: str, tensor: Tensor) -> list[Any]:
    if tensor.numel() > _MOST_NUMBERS:
        raise ConfigError(
            f"The optimizer's state {key!r} has the shape {tuple(tensor.shape)}, which is not its parameter's, so it "
            "cannot be put together from parts. Use an elementwise optimizer such as SGD or AdamW, or strategy 'ddp'."
        )
    return [str(tensor.dtype), list(tensor.shape), tensor.detach().flatten().tolist()]


def _from_json(value: list[Any]) -> Tensor:
    dtype, shape, numbers = value
    return torch.tensor(numbers, dtype=_dtype(dtype)).reshape(shape)
