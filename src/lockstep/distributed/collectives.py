"""Small exchanges between ranks: JSON and tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.runtime.stack_dump import Mark, stack_marker

_LENGTH, _SHORT = 8, 248  # bytes of the length of a JSON value, and of the value where one exchange carries it


@stack_marker(Mark.WAITS_FOR_EXCHANGE)
def all_gather_flat(
    output: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Gathers every rank's flat ``part`` into ``output``. Collective. Its name differs between versions of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, part, group=group, async_op=async_op)
    return work


def all_gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gathers rows of shape (n,) from all ranks to (ranks, n); without a group only this process's. Collective."""
    if group is None:
        return row.unsqueeze(0)
    rows = torch.empty(dist.get_world_size(group), row.numel(), dtype=row.dtype, device=row.device)
    all_gather_flat(rows.view(-1), row.contiguous(), group)
    return rows


def exchange_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where numbers that hosts read are exchanged: on the CPU, unless the group takes only tensors on ``device``.

    A process that reads a number from a GPU waits for all that it has launched there.
    """
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device


def all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of each entry over the ranks, in a tensor of its own. Collective."""
    largest = values.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def drop_process_groups(*holders: object) -> None:
    """Sets the attributes of objects that are process groups to None.

    A gloo group that is still referenced when the interpreter exits is destroyed after its threads, which sometimes
    aborts the process ("terminate called without an active exception") although all work is done.
    """
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(holder, name, None)


@stack_marker(Mark.WAITS_FOR_EXCHANGE)
def gather_json(value: object, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Gathers a JSON value from every rank, by rank; without a group only this process's. Collective."""
    if group is None:
        return [value]
    device, text, width = exchange_device(group, device), json.dumps(value).encode(), _SHORT
    while True:
        own = bytearray(len(text).to_bytes(_LENGTH, "little") + text[:width].ljust(width))  # JSON may end with spaces
        rows = all_gather_rows(torch.frombuffer(own, dtype=torch.uint8).to(device), group).cpu().numpy()
        longest = max(int.from_bytes(row[:_LENGTH], "little") for row in rows)
        if longest <= width:  # else all of it follows
            return [json.loads(row[_LENGTH:].tobytes()) for row in rows]
        width = longest


@stack_marker(Mark.WAITS_FOR_EXCHANGE)
def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrites the tensors with those of global rank ``source``. Collective; same shapes on every rank."""
    for tensor in tensors:
        data = tensor.detach()
        packed = data.contiguous()
        dist.broadcast(packed, source, group=group)
        if packed is not data:
            data.copy_(packed)
