"""The index of tar shards: where each member of each sample stands, found once and kept in one file.

    index file   32 bytes of BLAKE2b over the rest | a ``.npz`` of the arrays of ``TarIndex``

It is written to a temporary name and moved into place, so a reader sees a whole one or none. It is used only while
each shard has the name, size and time of change that were noted; else, or where its bytes were altered, it is made
anew. Where the folder cannot be written to, the index is made in memory for each run.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

_VERSION = 1
_DIGEST = 32
_BLOCK = 512
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TarIndex:
    """Members in the order of the shards; those from ``first[i]`` to ``first[i + 1]`` make sample ``i``."""

    shards: Numbers
    """Of shape (shards, 2): size in bytes and time of change in nanoseconds."""
    names: npt.NDArray[np.str_]
    """File names of the shards."""
    first: Numbers
    """Of shape (samples + 1,): the first member of each sample, and their number."""
    shard: Numbers
    """Of shape (samples,): the shard that a sample is in."""
    keys: npt.NDArray[np.bytes_]
    """Of shape (samples,): the path that a sample's members share, in UTF-8."""
    kinds: npt.NDArray[np.str_]
    """The endings that occur, such as ``jpg`` and ``cls``."""
    kind: Numbers
    """Of shape (members,): a position in ``kinds``."""
    offset: Numbers
    """Of shape (members,): where the content begins in its shard."""
    size: Numbers
    """Of shape (members,): bytes of the content."""


def open_index(shards: Sequence[Path], index_file: Path) -> TarIndex:
    """The index of the shards: the one in ``index_file`` if it is theirs, else a new one, which is kept there.

    ``DataError`` names a shard that is missing, compressed, cut off, or holds links.
    """
    state = _state(shards)
    names = np.array([shard.name for shard in shards])
    found = _read(index_file)
    if found is not None and np.array_equal(found.names, names) and np.array_equal(found.shards, state):
        return found
    index = _scanned(shards, names, state)
    with suppress(OSError):  # a folder that cannot be written to: the index stays in memory
        _write(index_file, index)
    return index


def _state(shards: Sequence[Path]) -> Numbers:
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"The shard {shard} does not exist.")
    return np.array([(shard.stat().st_size, shard.stat().st_mtime_ns) for shard in shards], dtype=np.int64)


def _scanned(shards: Sequence[Path], names: npt.NDArray[np.str_], state: Numbers) -> TarIndex:
    kinds: dict[str, int] = {}
    first: list[int] = []
    where: list[int] = []
    keys: list[bytes] = []
    members: list[tuple[int, int, int]] = []
    for number, shard in enumerate(shards):
        last, seen = "", set[str]()
        for name, offset, size in _members(shard):
            key, ending = _split(name)
            if key != last or not seen:
                last, seen = key, set()
                first.append(len(members))
                where.append(number)
                keys.append(key.encode())
            if ending in seen:
                raise DataError(f"{shard} holds {name!r} twice in a row, so its sample is not one.")
            seen.add(ending)
            members.append((kinds.setdefault(ending, len(kinds)), offset, size))
    table = np.array(members, dtype=np.int64).reshape(-1, 3)
    return TarIndex(
        shards=state,
        names=names,
        first=np.array([*first, len(members)], dtype=np.int64),
        shard=np.array(where, dtype=np.int64),
        keys=np.array(keys, dtype=np.bytes_),
        kinds=np.array(list(kinds), dtype=np.str_),
        kind=table[:, 0].copy(),
        offset=table[:, 1].copy(),
        size=table[:, 2].copy(),
    )


def _members(shard: Path) -> list[tuple[str, int, int]]:
    """Name, place and size of each file in a shard; only the headers are read."""
    found = []
    try:
        with cast(Any, tarfile.open(shard, "r:")) as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(
                        f"{shard} holds {member.name!r}, which is a link or no ordinary file. Pack plain files only."
                    )
                if member.offset_data + member.size > shard.stat().st_size:
                    raise DataError(f"{shard} is cut off within {member.name!r}. Download it again.")
                found.append((member.name, member.offset_data, member.size))
                archive.members = []  # or tarfile keeps every header in memory
            end = archive.offset
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(
            f"{shard} cannot be read as a tar file without compression: {error}. "
            "Unpack a .tar.gz to .tar, or download the shard again."
        ) from error
    with shard.open("rb") as file:
        file.seek(end)
        if not found or file.read(_BLOCK) != b"\0" * _BLOCK:
            raise DataError(
                f"{shard} has no end mark behind its {len(found)} members, so it is cut off, damaged or empty. "
                "Download it again."
            )
    return found


def _split(name: str) -> tuple[str, str]:
    """``("train/001", "seg.png")`` of ``train/001.seg.png``: the ending begins at the file name's first dot."""
    path = PurePosixPath(name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)) if stem else str(path), ending.lower()


def _read(index_file: Path) -> TarIndex | None:
    """The index in a file; nothing where there is none, or none that is whole."""
    try:
        content = index_file.read_bytes()
        if hashlib.blake2b(content[_DIGEST:], digest_size=_DIGEST).digest() != content[:_DIGEST]:
            return None
        with np.load(io.BytesIO(content[_DIGEST:]), allow_pickle=False) as arrays:
            if int(arrays["version"]) != _VERSION:
                return None
            return TarIndex(**{name: arrays[name] for name in TarIndex.__dataclass_fields__})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(index_file: Path, index: TarIndex) -> None:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = asdict(index)
    np.savez(buffer, version=np.array(_VERSION), **arrays)
    content = buffer.getvalue()
    with NamedTemporaryFile(dir=index_file.parent, prefix=f".{index_file.name}-", delete=False) as file:
        try:
            file.write(hashlib.blake2b(content, digest_size=_DIGEST).digest() + content)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)  # others who may read the shards read the index too
            Path(file.name).replace(index_file)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
