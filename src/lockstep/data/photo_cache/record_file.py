"""A file of records of any length, written once and whole, then mapped into memory by whoever reads it.

    records, one after the other | index: an ``.npz`` of arrays | footer: place, size and BLAKE2b of the index, mark

It is written under a hidden name, made durable and renamed, so a reader sees a whole file or none, also after a crash.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Records are of a multiple of this many bytes; who appends them fills them up."""

_MARK = b"lockstep records"
_FOOTER = struct.Struct("<QQ32s16s")
_STARTS = "starts"

Bytes = npt.NDArray[np.uint8]


class RecordFile:
    """The records of a file, by number. Processes that are forked, and others that open it, share its memory.

    Args:
        path: the file.

    Raises:
        OSError: there is no such file.
        ValueError: it is none of these files, or its index was altered or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FOOTER.size:
                raise ValueError(f"{path} is no file of records")
            # private and writable, since torch takes no read-only memory without a warning; nobody writes to it
            self._bytes: Bytes = np.frombuffer(
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=np.uint8
            )
        self.arrays = _index(self._bytes, path)
        """What ``RecordWriter.finish`` was given."""
        self._starts = self.arrays.pop(_STARTS)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Bytes:
        """The bytes of a record, where they lie."""
        return self._bytes[int(self._starts[number]) : int(self._starts[number + 1])]

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFile, (self.path,)


class RecordWriter:
    """Appends records to a file that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._starts = [0]
        self.finished = False

    @property
    def written(self) -> int:
        """Bytes of all records so far."""
        return self._starts[-1]

    def append(self, content: Bytes, sizes: list[int]) -> None:
        """Appends ``len(sizes)`` records that lie in ``content`` one after the other."""
        if sum(sizes) != len(content) or any(size % ALIGNMENT for size in sizes):
            raise ValueError(
                f"records of {sizes} bytes do not fill {len(content)} bytes in steps of {ALIGNMENT}"
            )
        self._file.write(content.data)
        for size in sizes:
            self._starts.append(self._starts[-1] + size)

    def finish(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes the index, with arrays that say what the records are."""
        buffer = io.BytesIO()
        entries: dict[str, Any] = {**arrays, _STARTS: np.array(self._starts, dtype=np.int64)}
        np.savez(buffer, **entries)
        index = buffer.getvalue()
        digest = hashlib.blake2b(index, digest_size=32).digest()
        self._file.write(index + _FOOTER.pack(self.written, len(index), digest, _MARK))
        self.finished = True


@contextmanager
def writing(path: Path) -> Iterator[RecordWriter]:
    """Writes the file ``path`` anew; it appears if the block ends after ``finish``, and else stays as it was.

    Only one process at a time may write a file: hold ``lock_file``.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb") as file:
            writer = RecordWriter(file)
            yield writer
            file.flush()
            os.fsync(file.fileno())
        if writer.finished:
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _index(content: Bytes, path: Path) -> dict[str, npt.NDArray[Any]]:
    start, size, digest, mark = _FOOTER.unpack(content[-_FOOTER.size :].tobytes())
    index = content[start : start + size].tobytes()
    whole = start + size + _FOOTER.size == len(content)
    if mark != _MARK or not whole or hashlib.blake2b(index, digest_size=32).digest() != digest:
        raise ValueError(f"{path} is no whole file of records")
    try:
        with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} has no index: {error}") from error
