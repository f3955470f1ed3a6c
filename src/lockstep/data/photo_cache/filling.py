"""Decodes every photo once, in worker processes, and writes what is kept of it to a file."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.decoding import open_photo
from lockstep.data.inline import Request
from lockstep.data.keyed import EVALUATION_EPOCH, SampleKeys
from lockstep.data.opening import open_reading
from lockstep.data.photo_cache.forms import ABSENT, Form, joined
from lockstep.data.photo_cache.record_file import ALIGNMENT, RecordWriter, writing
from lockstep.data.photo_cache.sources import Photos
from lockstep.errors import ConfigError
from lockstep.permutation import Indices

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_DIGEST = 16
_SPARE, _MOST_SPARE = 0.05, 10e9
"""Part of a disk that is left free, and bytes that suffice on a large one."""


def fill(
    file: Path,
    photos: Photos,
    form: Form,
    *,
    workers: int,
    tell: Callable[[int, int], None],
) -> None:
    """Writes the file for some photos.

    Args:
        file: appears when it is whole.
        photos: where they are found.
        form: what is kept of each.
        workers: processes that decode; 0 decodes here.
        tell: called with the number of photos done and of all.

    Raises:
        ConfigError: the disk has not enough room.
    """
    state, count = photos.states(), len(photos)
    rows: list[npt.NDArray[np.int64]] = []
    digests: list[npt.NDArray[np.uint8]] = []
    logger.info("%d photos are decoded once, into %s", count, file)
    reading = open_reading(_Decoded(photos, form), seed=0, workers=workers)
    try:
        with writing(file) as writer:
            for content, sizes, table, digest in reading.read(_requests(count)):
                _check_room(file, writer, sum(map(len, rows)), count)
                _append(writer, content.numpy(), sizes.tolist(), file)
                rows.append(table.numpy())
                digests.append(digest.numpy())
                tell(sum(map(len, rows)), count)
            writer.finish({"rows": np.concatenate(rows), "digests": np.concatenate(digests), "states": state})
            logger.info("The decoded photos take %.0f MB", writer.written / 1e6)
    finally:
        reading.close()


def content_digest(content: bytes) -> npt.NDArray[np.uint8]:
    """BLAKE2b of a file's content, 16 bytes."""
    return np.frombuffer(hashlib.blake2b(content, digest_size=_DIGEST).digest(), dtype=np.uint8)


class _Decoded(Dataset[Any]):
    """What is kept of each photo, read in blocks."""

    def __init__(self, photos: Photos, form: Form) -> None:
        self._photos, self._form = photos, form

    def __len__(self) -> int:
        return len(self._photos)

    def get_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, ...]:
        """All bytes; their number, row and digest for each photo."""
        kept, rows, digests = [], [], []
        for index in indices.tolist():
            content, row, digest = self._decode(index)
            kept.append(content)
            rows.append(row)
            digests.append(digest)
        sizes = torch.tensor([len(content) for content in kept], dtype=torch.int64)
        return (
            torch.from_numpy(np.concatenate(kept)),
            sizes,
            torch.tensor(rows, dtype=torch.int64),
            torch.from_numpy(np.stack(digests)),
        )

    def _decode(self, index: int) -> tuple[npt.NDArray[np.uint8], Any, npt.NDArray[np.uint8]]:
        content = b""
        try:
            content = self._photos.content(index)
            parts, row = self._form.encode(open_photo(content))
        except MemoryError:
            raise
        except Exception:  # whatever is wrong with the photo, who reads it from its store will be told
            return np.zeros(0, dtype=np.uint8), ABSENT, content_digest(content)
        return joined(parts, ALIGNMENT), row, content_digest(content)


def _requests(count: int) -> Iterator[Request]:
    for first in range(0, count, _AT_ONCE):
        yield Request(EVALUATION_EPOCH, np.arange(first, min(first + _AT_ONCE, count), dtype=np.int64))


def _append(writer: RecordWriter, content: npt.NDArray[np.uint8], sizes: list[int], file: Path) -> None:
    try:
        writer.append(content, sizes)
    except OSError as error:
        raise ConfigError(
            f"The decoded photos cannot be written to {file}: {error}. Give data.cache a folder with more room, or "
            "false."
        ) from error


def _check_room(file: Path, writer: RecordWriter, done: int, count: int) -> None:
    """Says early that the disk will be full: by what the photos so far have taken."""
    if not done:
        return
    disk = shutil.disk_usage(file.parent)
    left = writer.written / done * (count - done)
    spare = min(_SPARE * disk.total, _MOST_SPARE)
    if disk.free - left < spare:
        raise ConfigError(
            f"The {count:,} decoded photos would take about {(writer.written + left) / 1e9:.1f} GB, and {file.parent} "
            f"has {(disk.free + writer.written) / 1e9:.1f} GB free, of which {spare / 1e9:.1f} GB are left alone. "
            "Give data.cache a folder with more room, or false."
        )
