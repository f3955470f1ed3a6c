"""Writes a checkpoint that is either complete or absent.

.step-00000450.….partial/          [1] space is there; a hidden folder is made
    model.safetensors              [2] each file is written and made durable
    optimizer.safetensors
    state.json
    manifest.json                  [3] sizes and SHA-256 of the others, last
step-00000450/                     [4] one rename commits; then older ones may go
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.checkpoint.folder import name_of, prune
from lockstep.checkpoint.manifest import MANIFEST, RECORD, FileEntry, Manifest, file_names
from lockstep.checkpoint.record import canonical, encode
from lockstep.checkpoint.state import CheckpointState
from lockstep.core.atomic import clean, file_aside, folder_aside, make_durable
from lockstep.errors import CheckpointError, ConfigError
from lockstep.text import format_bytes, shorten

logger = logging.getLogger(__name__)

_SLACK = 1 << 16
"""Bytes that headers, records and folder entries may take beside the tensors."""


@dataclass(frozen=True, kw_only=True)
class PreparedCheckpoint:
    """A checkpoint whose folder has room for it; nothing of it is written yet."""

    path: Path
    """The checkpoint's folder once it is committed."""
    state: CheckpointState
    record: bytes
    """The content of ``state.json``."""
    step: int
    keep: int | None

    def write(self) -> Path:
        """Writes and commits the checkpoint, deletes older ones, and returns the checkpoint's folder.

        On any failure what was there before is untouched and nothing new is left.
        """
        with not_written(self.step, self.path.parent), folder_aside(self.path) as aside:
            self.commit(aside, write_tensors(aside, self.state, file_names()))
        self.prune()
        return self.path

    def commit(self, aside: Path, files: Mapping[str, FileEntry]) -> None:
        """Adds the record and the manifest to a hidden folder with durable ``files``, and names it a checkpoint."""
        record = _write_bytes(aside / RECORD, self.record)
        _write_bytes(aside / MANIFEST, Manifest(self.step, {**files, RECORD: record}).to_bytes())
        make_durable(aside)
        aside.rename(self.path)
        make_durable(self.path.parent)

    def prune(self) -> None:
        """Deletes older checkpoints; where that fails the log says so."""
        directory = self.path.parent
        try:
            prune(directory, keep=self.keep, protect={self.step})
        except (OSError, CheckpointError) as error:
            logger.warning("Older checkpoints in %s were not removed: %s", directory, error)


def write(directory: Path | str, state: CheckpointState, *, step: int, keep: int | None = None) -> Path:
    """Writes ``state`` as the checkpoint of ``step`` and returns its folder; one process of the run calls it.

    On any failure what was there before is untouched and nothing new is left. What a process that was killed while
    it wrote has left in the folder is removed first.

    Args:
        directory: the run folder; made if it does not exist.
        state: what to write; its tensors may be on any device.
        step: global step, the checkpoint's name.
        keep: how many of the newest checkpoints stay, this one included, beside the best one; None keeps all.
    """
    return prepare(directory, state, step=step, keep=keep).write()


def prepare(
    directory: Path | str,
    state: CheckpointState,
    *,
    step: int,
    keep: int | None = None,
    tensor_bytes: int | None = None,
) -> PreparedCheckpoint:
    """The first part of ``write``: refuses what cannot be written.

    ``tensor_bytes`` is the size of all tensors, where ``state`` holds only some of them.

    Raises:
        ConfigError: the state holds something that a checkpoint cannot.
        CheckpointError: the folder cannot be written, or has no room.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep} checkpoints cannot be kept: the one being written is one. Use 1 or more.")
    directory = Path(directory)
    require_dense({**state.model, **state.optimizer})
    needed = state.tensor_bytes if tensor_bytes is None else tensor_bytes
    record = canonical(
        {
            "progress": {
                name: encode(each, "run.extra" if name == "extra" else name, ordered=name == "extra")
                for name, each in state.progress.items()
            },
            "aliases": {**state.aliases},
            "optimizers": state.optimizer_records,
        }
    )
    with not_written(step, directory):
        directory.mkdir(parents=True, exist_ok=True)
        clean(directory)
        require_space(directory, needed + len(record))
        path = name_of(directory, step)
    return PreparedCheckpoint(path=path, state=state, record=record, step=step, keep=keep)


@contextmanager
def not_written(step: int, directory: Path) -> Iterator[None]:
    """Turns what the system says of a disk into one ``CheckpointError``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {directory}: {error}. "
            "What was there before is untouched; make room, choose another folder, or raise the limits of this shell "
            "(ulimit -f and -n)."
        ) from error


def require_space(directory: Path, needed: int) -> None:
    """``CheckpointError`` where less than ``needed`` bytes are left for this user in ``directory``."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if free < needed + _SLACK:
        raise CheckpointError(
            f"no space: needs {format_bytes(needed + _SLACK)}, {format_bytes(free)} free at {directory}. "
            "Nothing was written; make room, keep fewer checkpoints, or choose another folder."
        )


def export(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Writes model weights as one plain safetensors file, replacing an older one atomically.

    ``model.load_state_dict(safetensors.torch.load_file(path))`` takes it on the unwrapped model, where a tied tensor
    is given under each of its names. ``metadata`` are strings for the file's header, by name.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
        with file_aside(path) as aside:
            _write_tensors(aside, tensors, metadata or {})
            if metadata:
                _sort_metadata(aside)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The weights could not be written to {path}: {error}. Choose another file.") from error
    return path


def write_tensors(folder: Path, state: CheckpointState, names: tuple[str, str]) -> dict[str, FileEntry]:
    """Writes the tensors of a state, durably, to files named by ``file_names``; returns a manifest's entries."""
    for name, tensors in zip(names, (state.model, state.optimizer)):
        _write_tensors(folder / name, tensors, {})
        make_durable(folder / name)
    return {name: FileEntry.of(folder / name) for name in names}


def _write_bytes(path: Path, content: bytes) -> FileEntry:
    path.write_bytes(content)
    make_durable(path)
    return FileEntry.of(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    require_dense(tensors)
    require_storable(tensors)
    seen: set[int] = set()
    plain = {name: _plain(tensor, seen) for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors would let only the owner read the file
    safetensors.torch.save_file(plain, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Puts the metadata into the order of their names: safetensors writes several in another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) != size:
            raise ValueError(f"the header of {path} would have {len(text)} bytes instead of {size}")
        file.seek(8)
        file.write(text)


def require_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ConfigError`` that names the tensors whose dtype no checkpoint holds, such as complex128."""
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        try:
            safetensors.torch.save({"none": torch.empty(0, dtype=dtype)})
        except KeyError as error:
            odd = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
            raise ConfigError(f"A checkpoint cannot hold {dtype}, the dtype of {shorten(odd)}.") from error


def require_dense(tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ConfigError`` that names the tensors that are sparse, which no checkpoint holds."""
    odd = [f"{name} ({tensor.layout})" for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if odd:
        raise ConfigError(f"A checkpoint holds dense tensors only, and these are not: {shorten(odd)}.")


def _plain(tensor: Tensor, seen: set[int]) -> Tensor:
    """Only the values: on the CPU, in row order, in memory that no other tensor of the file shares."""
    values = tensor.detach().cpu().contiguous()
    memory = values.untyped_storage()
    if memory.nbytes() != values.numel() * values.element_size() or memory.data_ptr() in seen:
        return values.clone()
    seen.add(memory.data_ptr())
    return values
