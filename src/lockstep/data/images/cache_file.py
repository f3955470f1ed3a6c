"""Files of records with an index, and the two formats in which a photo cache keeps photos in them.

    records, one after the other | index: an ``.npz`` of arrays | footer: offset, size and BLAKE2b of the index, mark

The index has a CRC-32 of each record, which a process compares when it reads the record first. The file is written
under a hidden name, made durable and renamed, so a reader sees the whole file or none, also after a crash. Readers map
it into memory.

    format             for                                      kept
    WholePhotos        transforms with random numbers,          the photo, upright, at full scale and at each reduced
                       and any other callable                   one that a crop of the pictures' size can ask for
    FinishedPictures   CenterCrop and Resize                    the picture

Both give the bits that decoding the file gives. What is not kept, such as a scale that only another transform asks for,
is decoded from the file.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from lockstep.core.atomic import file_aside
from lockstep.data.images.decoding import Photo, Pixels, pixels_digest, reduced, reduction
from lockstep.data.images.transforms import CenterCrop, ImageTransform, Resize, Squeeze, Transform, cut_into

ALIGNMENT = 64
"""Records are of a multiple of this many bytes, padded by the caller."""

_MARK = b"lockstep records"
_FOOTER = struct.Struct("<QQ32s16s")
_STARTS, _SUMS = "starts", "sums"

Bytes = npt.NDArray[np.uint8]


class RecordFile:
    """The records of a file, by number. Processes that are forked, and others that open it, share its memory.

    ``ValueError`` if it is none of these files, or its index was altered or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FOOTER.size:
                raise ValueError(f"{path} is not a photo cache file")
            # private and writable, since torch takes no read-only memory without a warning; nobody writes to it
            self._bytes: Bytes = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=np.uint8)
        self.arrays, self._starts, self._sums = _index(self._bytes, path)
        """The arrays given to ``RecordWriter.finish``."""
        self._is_verified = np.zeros(len(self), dtype=bool)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Bytes:
        """The bytes of a record, where they lie."""
        return self._bytes[int(self._starts[number]) : int(self._starts[number + 1])]

    def verified(self, number: int) -> Bytes | None:
        """The bytes of a record, whose checksum is compared the first time in a process; None where it differs."""
        record = self[number]
        if not self._is_verified[number]:
            if zlib.crc32(record.data) != self._sums[number]:
                return None
            self._is_verified[number] = True
        return record

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFile, (self.path,)


class RecordWriter:
    """Appends records to a file that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._starts, self._sums = [0], list[int]()
        self.finished = False

    @property
    def written(self) -> int:
        """Bytes of all records so far."""
        return self._starts[-1]

    def append(self, content: Bytes, sizes: list[int]) -> None:
        """Appends ``len(sizes)`` records that lie in ``content`` one after the other."""
        if sum(sizes) != len(content) or any(size % ALIGNMENT for size in sizes):
            raise ValueError(f"records of {sizes} bytes do not fill {len(content)} bytes in steps of {ALIGNMENT}")
        self._file.write(content.data)
        first = 0
        for size in sizes:
            self._starts.append(self._starts[-1] + size)
            self._sums.append(zlib.crc32(content[first : first + size].data))
            first += size

    def finish(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes the index, with arrays that say what the records are."""
        buffer = io.BytesIO()
        own = {_STARTS: np.array(self._starts, dtype=np.int64), _SUMS: np.array(self._sums, dtype=np.uint32)}
        entries: dict[str, Any] = {**arrays, **own}
        np.savez(buffer, **entries)
        index = buffer.getvalue()
        digest = hashlib.blake2b(index, digest_size=32).digest()
        self._file.write(index + _FOOTER.pack(self.written, len(index), digest, _MARK))
        self.finished = True


@contextmanager
def writing(path: Path, *, alone: bool = True) -> Iterator[RecordWriter]:
    """Replaces the file ``path`` if the block ends after ``finish``; otherwise the file stays as it was.

    ``alone`` is False where several processes may write it at once, without ``lock_file``.
    """
    with file_aside(path, alone=alone) as aside:
        with aside.open("wb") as file:
            writer = RecordWriter(file)
            yield writer
        if not writer.finished:
            aside.unlink()


def _index(content: Bytes, path: Path) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any], npt.NDArray[Any]]:
    """The given arrays, and where records start and their checksums, which files of earlier versions do not have."""
    start, size, digest, mark = _FOOTER.unpack(content[-_FOOTER.size :].tobytes())
    index = content[start : start + size].tobytes()
    whole = start + size + _FOOTER.size == len(content)
    if mark != _MARK or not whole or hashlib.blake2b(index, digest_size=32).digest() != digest:
        raise ValueError(f"{path} is not a complete photo cache file")
    try:
        with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
            return found, found.pop(_STARTS), found.pop(_SUMS)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} has no index: {error}") from error


Row = tuple[int, int, int, int]
"""Width and height at full scale, the number of scales kept, and whether the format has reduced scales at all."""

ABSENT: Row = (0, 0, 0, 0)
"""Of a photo that cannot be decoded: it is read from its file, which says why."""


@dataclass(frozen=True)
class WholePhotos:
    """Keeps decoded photos."""

    size: int
    """Of the pictures that are cut; 0 to keep full scale only."""

    def settings(self) -> dict[str, Any]:
        """Everything beside the file that the kept bytes depend on."""
        return {"form": "photos", "size": self.size, "pixels": pixels_digest()}

    def encode(self, photo: Photo) -> tuple[list[Pixels], Row]:
        """The arrays to keep of a photo, one after the other, and the photo's row in the index."""
        width, height = photo.width, photo.height
        kept, scalable = [photo.pixels()], True
        excess = min(width, height) // self.size if self.size else 1
        factor = 2
        while scalable and factor <= reduction(width, height, excess):
            pixels = photo.pixels(factor)
            scalable = pixels.shape[:2] == (reduced(height, factor), reduced(width, factor))
            kept += [pixels] if scalable else []
            factor *= 2
        return kept, (width, height, len(kept), int(scalable))


@dataclass(frozen=True)
class FinishedPictures:
    """Keeps the pictures of a transform without random numbers, which its settings describe whole."""

    transform: CenterCrop | Resize

    def settings(self) -> dict[str, Any]:
        """Everything beside the file that the kept bytes depend on."""
        kernel = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        return {
            "form": "pictures",
            "transform": repr(self.transform).replace("Resize(", "Squeeze("),  # its name in existing files
            "pixels": pixels_digest(),
            "resized by": kernel,
        }

    def encode(self, photo: Photo) -> tuple[list[Pixels], Row]:
        """The picture, and the photo's row in the index."""
        size = self.transform.size
        picture = torch.empty(3, size, size, dtype=torch.uint8)
        cut_into(photo, self.transform, np.empty(0), picture)
        return [picture.numpy()], (photo.width, photo.height, 1, 0)


CacheFormat = WholePhotos | FinishedPictures


class CachedImage:
    """A photo whose pixels are in the cache file; ``opened`` opens it itself, for a scale that was not kept."""

    def __init__(self, kept: Pixels, row: Row, opened: Callable[[], Photo]) -> None:
        self._kept, self._opened = kept, opened
        self.width, self.height, self._scales, self._scalable = row

    def pixels(self, factor: int = 1) -> Pixels:
        """See ``Photo``; a view of the file, no copy."""
        wanted = factor if self._scalable else 1
        start, scale = 0, 1
        for _ in range(self._scales):
            shape = (reduced(self.height, scale), reduced(self.width, scale), 3)
            length = shape[0] * shape[1] * 3
            if scale == wanted:
                return self._kept[start : start + length].reshape(shape)
            start, scale = start + length, 2 * scale
        return self._opened().pixels(factor)


def cache_format(transform: Transform | None) -> CacheFormat:
    """The format for a transform."""
    if isinstance(transform, (CenterCrop, Resize)) and type(transform) in (CenterCrop, Resize, Squeeze):
        return FinishedPictures(transform)
    return WholePhotos(transform.size if isinstance(transform, ImageTransform) else 0)
