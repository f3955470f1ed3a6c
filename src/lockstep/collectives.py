"""Small exchanges between ranks: JSON and tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_flat(
    output: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Every rank's flat ``part``, one after the other, in ``output``. Collective. torch renamed it over versions."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, part, group=group, async_op=async_op)
    return work


def let_go_of_groups(*holders: object) -> None:
    """Makes objects forget the process groups they hold.

    A gloo group that is still referred to when the interpreter ends is taken apart after its threads, which aborts the
    process ("terminate called without an active exception") now and then, although all its work was done.
    """
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(holder, name, None)


def gather_json(value: object, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value, by rank. The value must survive JSON. Collective: every rank of ``group`` must call this."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    ranks = dist.get_world_size(group)
    sizes = torch.zeros(ranks, dtype=torch.int64, device=device)
    all_gather_flat(sizes, torch.tensor([len(data)], device=device), group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = torch.zeros(ranks * longest, dtype=torch.uint8, device=device)
    all_gather_flat(parts, padded, group)
    rows = parts.view(ranks, longest).cpu()
    return [json.loads(bytes(rows[rank, : int(sizes[rank])].tolist())) for rank in range(ranks)]


def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrites the tensors with those of global rank ``source``. Collective; same shapes on every rank."""
    for tensor in tensors:
        data = tensor.detach()
        if data.is_contiguous():
            dist.broadcast(data, source, group=group)
        else:
            packed = data.contiguous()
            dist.broadcast(packed, source, group=group)
            data.copy_(packed)
