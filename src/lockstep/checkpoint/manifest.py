"""The files of a checkpoint, and the manifest with their sizes and SHA-256.

    manifest.json                         every file with size and SHA-256, itself sealed by a digest
    state.json                            the record
    model.safetensors                     the whole model, written by one process
    model-00002-of-00004.safetensors      what the second of four processes held: rows (dim 0) of some tensors

The rows of a tensor lie in the files in their order; a tensor of one file only is whole there. ``optimizer`` likewise.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.checkpoint.record import JSON, canonical
from lockstep.errors import CheckpointError, CheckpointMismatch

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


MANIFEST = "manifest.json"
FORMAT = 1

_FILE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}\.(?:safetensors|json)")
_SMALL = 1 << 22
_LARGEST_RECORD = 1 << 28


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Reads the size and the digest of a file."""
        return cls(path.stat().st_size, digest(path))


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and its step."""

    step: int
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``."""
        files: JSON = {name: asdict(entry) for name, entry in self.files.items()}
        return seal({"format": FORMAT, "step": self.step, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads ``manifest.json``; ``CheckpointError`` if any byte of it was changed."""
        body = read_sealed(folder / MANIFEST)
        if body.get("format") != FORMAT:
            raise CheckpointMismatch(
                f"{folder} is in checkpoint format {body.get('format')}, and this version reads {FORMAT}. "
                "Read it with the version of Lockstep that wrote it."
            )
        step, files = body.get("step"), body.get("files")
        if not isinstance(step, int) or step < 0 or not isinstance(files, dict):
            raise CheckpointError(f"{folder / MANIFEST} does not list a step and files. Use another checkpoint.")
        return cls(step, {name: _entry(folder, name, entry) for name, entry in files.items()})

    def verify(self, folder: Path) -> None:
        """Reads all bytes of every file; ``CheckpointError`` names the first that differs from its entry."""
        if tensor_files(self.files) is None:
            raise CheckpointError(f"{folder / MANIFEST} does not list the files of a checkpoint: {sorted(self.files)}.")
        for name, entry in self.files.items():
            path = folder / name
            size = regular_size(path)
            if size != entry.size:
                raise CheckpointError(
                    f"{path} has {size} bytes instead of {entry.size}: it was truncated or replaced. "
                    "Use another checkpoint."
                )
            if name == RECORD and size > _LARGEST_RECORD:
                raise CheckpointError(
                    f"{path} has {size} bytes; the limit for a record is {_LARGEST_RECORD}. It was not read."
                )
            if digest(path) != entry.sha256:
                raise CheckpointError(
                    f"{path} does not match the SHA-256 in its manifest: at least one byte has "
                    "changed since it was written. Use another checkpoint."
                )


def _entry(folder: Path, name: str, entry: JSON) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{folder / MANIFEST} lists a file with the invalid name {name!r}; it was not read.")
    if isinstance(entry, dict):
        size, sha256 = entry.get("size"), entry.get("sha256")
        if isinstance(size, int) and size >= 0 and isinstance(sha256, str):
            return FileEntry(size, sha256)
    raise CheckpointError(f"{folder / MANIFEST} lists {name} without its size and SHA-256.")


def seal(body: dict[str, JSON]) -> bytes:
    """JSON with its own SHA-256 in it, in the canonical form that ``read_sealed`` requires."""
    return canonical({"body": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()}) + b"\n"


def read_sealed(path: Path) -> dict[str, JSON]:
    """Reads the output of ``seal``; ``CheckpointError`` if it is missing, too large, or changed in any byte."""
    if regular_size(path) > _SMALL:
        raise CheckpointError(
            f"{path} is larger than {_SMALL} bytes, the limit for a manifest. It was not read. Use another checkpoint."
        )
    content = path.read_bytes()
    try:
        body = json.loads(content)["body"]
        intact = isinstance(body, dict) and seal(body) == content
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} was changed after it was written: its own SHA-256 does not match. Use another checkpoint."
        )
    assert isinstance(body, dict)
    return body


def regular_size(path: Path) -> int:
    """The size of a readable file; ``CheckpointError`` for a missing one, a link, or anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file but a link, folder or device; it was not read.")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read: Permission denied.")
    return found.st_size


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
