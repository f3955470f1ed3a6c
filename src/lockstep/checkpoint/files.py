"""Which files hold the tensors of a checkpoint, and how they are put together.

    model.safetensors                     the whole model, written by one process
    model-00002-of-00004.safetensors      what the second of four processes held: rows (dim 0) of some tensors

The rows of a tensor lie in the files in their order; a tensor of one file only is whole there. ``optimizer`` likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from lockstep.errors import CheckpointError

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RECORD = "state.json"


def file_names(shard: int = 0, shards: int = 1) -> tuple[str, str]:
    """The files of the model's and of the optimizers' tensors that one of ``shards`` processes writes."""
    if shards == 1:
        return MODEL, OPTIMIZER
    number = f"-{shard + 1:05d}-of-{shards:05d}."
    return MODEL.replace(".", number), OPTIMIZER.replace(".", number)


def tensor_files(names: Collection[str]) -> tuple[list[str], list[str]] | None:
    """The files of the model's and of the optimizers' tensors, in order; None where a checkpoint has other files."""
    shards = (len(names) - 1) // 2
    pairs = [file_names(shard, shards) for shard in range(shards)]
    expected = {RECORD, *(name for pair in pairs for name in pair)}
    if shards < 1 or set(names) != expected:
        return None
    return [model for model, _ in pairs], [optimizer for _, optimizer in pairs]


def load_tensors(paths: Iterable[Path], device: str) -> dict[str, Tensor]:
    """The tensors of some files, whole.

    Raises:
        CheckpointError: rows of one tensor do not fit together.
    """
    rows: dict[str, list[Tensor]] = {}
    for path in paths:
        for name, tensor in safetensors.torch.load_file(path, device=device).items():
            rows.setdefault(name, []).append(tensor)
    return {name: _joined(name, rows.pop(name)) for name in list(rows)}


def _joined(name: str, rows: list[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if len({(part.dtype, part.shape[1:], part.dim() > 0) for part in rows}) > 1 or not rows[0].dim():
        forms = ", ".join(f"{part.dtype} {list(part.shape)}" for part in rows)
        raise CheckpointError(
            f"The rows of {name!r} do not make up one tensor: {forms}. Use another checkpoint."
        )
    return torch.cat(rows)
