"""The manifest of a checkpoint: every file with size and SHA-256, itself sealed by a digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.encoding import JSON, canonical
from lockstep.checkpoint.files import RECORD, tensor_files
from lockstep.errors import CheckpointError, CheckpointMismatch

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
    """What a checkpoint consists of."""

    step: int
    files: dict[str, FileEntry]

    @classmethod
    def of(cls, folder: Path, step: int) -> Manifest:
        """Reads the sizes and digests of all files in ``folder``."""
        names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
        return cls(step, {name: FileEntry.of(folder / name) for name in names})

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``."""
        files: JSON = {
            name: {"size": entry.size, "sha256": entry.sha256} for name, entry in self.files.items()
        }
        return seal({"format": FORMAT, "step": self.step, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads ``manifest.json``; ``CheckpointError`` unless every byte of it is as it was written."""
        body = read_sealed(folder / MANIFEST)
        if body.get("format") != FORMAT:
            raise CheckpointMismatch(
                f"{folder} is in checkpoint format {body.get('format')}, and this version reads {FORMAT}. "
                "Read it with the version of Lockstep that wrote it."
            )
        step, files = body.get("step"), body.get("files")
        if not isinstance(step, int) or step < 0 or not isinstance(files, dict):
            raise CheckpointError(
                f"{folder / MANIFEST} does not list a step and files. Use another checkpoint."
            )
        return cls(step, {name: _entry(folder, name, entry) for name, entry in files.items()})

    def verify(self, folder: Path) -> None:
        """Reads all bytes of every file; ``CheckpointError`` names the first that is not as stated."""
        if tensor_files(self.files) is None:
            raise CheckpointError(
                f"{folder / MANIFEST} lists other files than a checkpoint has: {sorted(self.files)}."
            )
        for name, entry in self.files.items():
            path = folder / name
            size = regular_size(path)
            if size != entry.size:
                raise CheckpointError(
                    f"{path} should have {entry.size} bytes and has {size}: it was cut or replaced. "
                    "Use another checkpoint."
                )
            if name == RECORD and size > _LARGEST_RECORD:
                raise CheckpointError(
                    f"{path} has {size} bytes; a record is at most {_LARGEST_RECORD}. It was not read."
                )
            if digest(path) != entry.sha256:
                raise CheckpointError(
                    f"{path} does not have the SHA-256 its manifest states: at least one byte of it has "
                    "changed since it was written. Use another checkpoint."
                )


def _entry(folder: Path, name: str, entry: JSON) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{folder / MANIFEST} lists a file named {name!r}; such a name is never followed."
        )
    if isinstance(entry, dict):
        size, sha256 = entry.get("size"), entry.get("sha256")
        if isinstance(size, int) and size >= 0 and isinstance(sha256, str):
            return FileEntry(size, sha256)
    raise CheckpointError(f"{folder / MANIFEST} lists {name} without its size and SHA-256.")


def seal(body: dict[str, JSON]) -> bytes:
    """JSON with its own SHA-256 in it, in the one spelling that ``read_sealed`` accepts."""
    return canonical({"body": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()}) + b"\n"


def read_sealed(path: Path) -> dict[str, JSON]:
    """Reads what ``seal`` made; ``CheckpointError`` where it is missing, large, or changed in any byte."""
    if regular_size(path) > _SMALL:
        raise CheckpointError(f"{path} is larger than {_SMALL} bytes, which no manifest is. It was not read.")
    content = path.read_bytes()
    try:
        body = json.loads(content)["body"]
        intact = isinstance(body, dict) and seal(body) == content
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} is not as it was written: its own SHA-256 does not match. Use another checkpoint."
        )
    assert isinstance(body, dict)
    return body


def regular_size(path: Path) -> int:
    """The size of an ordinary file; ``CheckpointError`` for a missing one, a link, or anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the checkpoint is incomplete. Use another checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            f"{path} is not an ordinary file (a link, folder or device); it was not followed."
        )
    return found.st_size


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
