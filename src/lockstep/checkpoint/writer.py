"""Writes a checkpoint so that it exists whole or not at all.

.step-00000450.….partial/          [1] space is there; a hidden folder is made
    model.safetensors              [2] each file is written and made durable
    optimizer.safetensors
    state.json
    manifest.json                  [3] sizes and SHA-256 of the others, last
step-00000450/                     [4] one rename commits; then older ones may go
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.checkpoint.encoding import canonical, encode
from lockstep.checkpoint.folder import name_of, prune
from lockstep.checkpoint.manifest import MANIFEST, MODEL, OPTIMIZER, RECORD, Manifest
from lockstep.checkpoint.state import CheckpointState
from lockstep.checkpoint.temporary import clean, file_aside, folder_aside, make_durable
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.differences import shorten

logger = logging.getLogger(__name__)

_SLACK = 1 << 16
"""Bytes that headers, records and folder entries may take beside the tensors."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A checkpoint whose folder is ready; nothing of it is written yet."""

    path: Path
    """What it will be called once it is whole."""
    state: CheckpointState
    record: bytes
    """The content of ``state.json``."""
    step: int
    keep: int | None
    protect: frozenset[int]

    def carry_out(self) -> Path:
        """Writes and commits the checkpoint, deletes older ones, and returns the checkpoint's folder.

        On any failure what was there before is untouched and nothing new is left.
        """
        directory = self.path.parent
        try:
            with folder_aside(self.path) as aside:
                _write_files(aside, self.state, self.record, self.step)
                aside.rename(self.path)
                make_durable(directory)
        except (OSError, SafetensorError) as error:
            raise _not_written(self.step, directory, error) from error
        _prune_or_warn(directory, self.keep, {self.step, *self.protect})
        return self.path


def write(
    directory: Path | str,
    state: CheckpointState,
    *,
    step: int,
    keep: int | None = None,
    protect: Collection[int] = (),
) -> Path:
    """Writes ``state`` as the checkpoint of ``step`` and returns its folder; one process of the run calls it.

    On any failure what was there before is untouched and nothing new is left. What a process that was killed while
    it wrote has left in the folder is removed first.

    Args:
        directory: the run folder; made if it does not exist.
        state: what to write; its tensors may be on any device.
        step: global step, the checkpoint's name.
        keep: how many of the newest checkpoints stay, this one included; None keeps all.
        protect: steps that stay in any case; the recorded best one does without being named.
    """
    return prepare(directory, state, step=step, keep=keep, protect=protect).carry_out()


def prepare(
    directory: Path | str,
    state: CheckpointState,
    *,
    step: int,
    keep: int | None = None,
    protect: Collection[int] = (),
) -> Order:
    """The first part of ``write``, to which its arguments belong: refuses what cannot be written.

    Raises:
        ConfigError: the state holds something that a checkpoint cannot.
        CheckpointError: the folder cannot be written, or has no room.
    """
    if keep is not None and keep < 1:
        raise ConfigError(
            f"keep={keep} checkpoints cannot be kept: the one being written is one. Use 1 or more."
        )
    directory = Path(directory)
    _require_dense({**state.model, **state.optimizer})
    record = canonical(
        {
            "progress": encode(state.progress, "progress"),
            "aliases": {**state.aliases},
            "optimizers": state.optimizer_records,
        }
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clean(directory)
        require_space(directory, state.tensor_bytes + len(record))
        path = name_of(directory, step)
    except OSError as error:
        raise _not_written(step, directory, error) from error
    return Order(path=path, state=state, record=record, step=step, keep=keep, protect=frozenset(protect))


def _not_written(step: int, directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint of step {step} could not be written to {directory}: {error}. "
        "What was there before is untouched; make room or choose another folder."
    )


def require_space(directory: Path, needed: int) -> None:
    """``CheckpointError`` where less than ``needed`` bytes are left for this user in ``directory``."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < needed + _SLACK:
        raise CheckpointError(
            f"no space: needs {_readable(needed + _SLACK)}, {_readable(free)} free at {directory}. "
            "Nothing was written; make room, keep fewer checkpoints, or choose another folder."
        )


def export(path: Path | str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> Path:
    """Writes model weights as one plain safetensors file, replacing an older one atomically.

    ``model.load_state_dict(safetensors.torch.load_file(path))`` takes it on the unwrapped model: a tied
    tensor is written under each of its names.
    """
    path = Path(path)
    everything = {**tensors, **{alias: tensors[name] for alias, name in (aliases or {}).items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path.parent, sum(t.numel() * t.element_size() for t in everything.values()))
        with file_aside(path) as aside:
            _write_tensors(aside, everything)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The weights could not be written to {path}: {error}. Choose another file."
        ) from error
    return path


def _write_files(folder: Path, state: CheckpointState, record: bytes, step: int) -> None:
    _write_tensors(folder / MODEL, state.model)
    _write_tensors(folder / OPTIMIZER, state.optimizer)
    (folder / RECORD).write_bytes(record)
    manifest = Manifest.of(folder, step)
    for name in manifest.files:
        make_durable(folder / name)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    make_durable(folder / MANIFEST)
    make_durable(folder)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    _require_dense(tensors)
    seen: set[int] = set()
    plain = {name: _plain(tensor, seen) for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(plain, path, metadata={"format": "pt"})
    except KeyError as error:
        odd = [name for name, tensor in plain.items() if tensor.dtype == error.args[0]]
        raise ConfigError(
            f"A checkpoint cannot hold {error.args[0]}, the dtype of {shorten(odd)}."
        ) from error


def _require_dense(tensors: Mapping[str, Tensor]) -> None:
    odd = [f"{name} ({tensor.layout})" for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if odd:
        raise ConfigError(f"A checkpoint holds dense tensors only, and these are not: {shorten(odd)}.")


def _plain(tensor: Tensor, seen: set[int]) -> Tensor:
    """The values alone: on the CPU, in row order, in memory that no other tensor of the file shares."""
    values = tensor.detach().cpu().contiguous()
    memory = values.untyped_storage()
    if memory.nbytes() != values.numel() * values.element_size() or memory.data_ptr() in seen:
        return values.clone()
    seen.add(memory.data_ptr())
    return values


def _prune_or_warn(directory: Path, keep: int | None, protect: set[int]) -> None:
    try:
        prune(directory, keep=keep, protect=protect)
    except (OSError, CheckpointError) as error:
        logger.warning("Older checkpoints in %s were not removed: %s", directory, error)


def _readable(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"
