"""The state of a run by name, whole, however it is held: gathered for a checkpoint, shared out when one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoint import optimizer_state
from lockstep.checkpoint.encoding import JSON
from lockstep.errors import ConfigError
from lockstep.strategies import Strategy

Record = dict[str, JSON]
_MOST_NUMBERS = 4096
"""Of a state tensor that is not shaped like its parameter, such as a step counter."""


def gather_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    members: Sequence[Sequence[str]],
    strategy: Strategy,
    group: dist.ProcessGroup | None,
    *,
    keep: bool,
) -> tuple[dict[str, Tensor], Record]:
    """The whole state of an optimizer whose parameters are shared out. Collective.

    Args:
        optimizer: this process's.
        names: of what it holds.
        members: names of the parameters of each of its groups in the whole model.
        strategy: knows who holds what.
        group: all ranks.
        keep: whether this process needs the tensors.

    Returns:
        Tensors on the CPU and the record, as ``checkpoint.optimizer_state`` gives them.
    """
    tensors, record = optimizer_state(optimizer, names)
    shapes = {names[p]: p.shape for each in optimizer.param_groups for p in each["params"]}
    mine: dict[str, Any] = {"state": record["state"], "parts": {}, "values": {}}
    for key, tensor in tensors.items():
        name = key.partition("|")[0]
        if name in shapes and tensor.shape == shapes[name]:
            mine["parts"][key] = str(tensor.dtype)
        elif name:
            mine["values"][key] = _as_json(key, tensor)
    everyone = strategy.gather_records(mine, group)
    whole = {key: tensor.clone() for key, tensor in tensors.items() if not key.partition("|")[0]}
    for key, value in sorted({k: v for each in everyone for k, v in each["values"].items()}.items()):
        whole[key] = _from_json(value)
    for key, dtype in sorted({k: v for each in everyone for k, v in each["parts"].items()}.items()):
        name = key.partition("|")[0]
        part = tensors.get(key) if key in mine["parts"] else None
        gathered = strategy.whole(name, part, getattr(torch, dtype.removeprefix("torch.")))
        if keep:
            whole[key] = gathered.detach().to("cpu", copy=True)
    state = {name: entry for each in everyone for name, entry in each["state"].items()}
    groups = record["groups"]
    assert isinstance(groups, list)
    whole_groups: list[JSON] = [
        {**each, "parameters": list(own)} for each, own in zip(groups, members) if isinstance(each, dict)
    ]
    return whole, {**record, "groups": whole_groups, "state": state}


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


def _as_json(key: str, tensor: Tensor) -> list[Any]:
    if tensor.numel() > _MOST_NUMBERS:
        raise ConfigError(
            f"The optimizer's state {key!r} has the shape {tuple(tensor.shape)}, which is not its parameter's, so it "
            "cannot be put together from parts. Use an elementwise optimizer such as SGD or AdamW, or strategy 'ddp'."
        )
    return [str(tensor.dtype), list(tensor.shape), tensor.detach().flatten().tolist()]


def _from_json(value: list[Any]) -> Tensor:
    dtype, shape, numbers = value
    return torch.tensor(numbers, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
