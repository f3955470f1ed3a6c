"""Photos that are decoded once: finds the cache file of a set of photos, and builds it where there is none.

open_cache   is there a file of these photos and settings, and are the photos unchanged?   yes: map it
             no: take the lock (other processes wait), decode every photo in worker processes, write the file
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.atomic import NO_LOCKS
from lockstep.core.plan import Indices
from lockstep.data.images.cache_file import (
    ABSENT,
    ALIGNMENT,
    CachedImage,
    CacheFormat,
    FinishedPictures,
    RecordFile,
    RecordWriter,
    WholePhotos,
    cache_format,
    writing,
)
from lockstep.data.images.decoding import MAX_BYTES, Photo, open_photo, read_photo
from lockstep.data.images.transforms import ImageTransform, Transform, Uniforms, cut_into
from lockstep.data.keyed import SampleKeys
from lockstep.data.loader import EvaluationLoader
from lockstep.errors import ConfigError, DataError
from lockstep.text import format_bytes

_LOOK_EVERY = 0.1


@contextmanager
def lock_file(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file, made where it is absent, within the block; whoever dies gives it up.

    Calls ``waiting`` ten times a second while another process holds the lock. ``ConfigError`` if the file cannot be
    written to, or its file system has no locks.
    """
    try:
        if not path.exists():  # filelock tries without end where a file cannot be made
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ConfigError(f"Cannot write to {path.parent}: {error}. Give another folder.") from error
    lock = FileLock(path, fallback_to_soft=False)  # a soft lock would outlive a process that is killed
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_LOOK_EVERY, poll_interval=_LOOK_EVERY)
        except Timeout:
            waiting()
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise ConfigError(
                    f"The file system of {path.parent} has no locks ({error}). Give a folder on a local disk."
                ) from error
            raise ConfigError(f"Cannot write to {path.parent}: {error}. Give another folder.") from error
    try:
        yield
    finally:
        lock.release()


States = npt.NDArray[np.int64]
"""Of shape (photos, 2): a size and a time of change of what holds each photo; -1 where there is nothing."""


@dataclass(frozen=True)
class FolderPhotos:
    """A file for each photo."""

    root: Path
    paths: Sequence[str]
    """Below the root."""
    max_file_size: int = MAX_BYTES

    @property
    def name(self) -> str:
        """Begins the name of the cache file."""
        return self.root.name or "photos"

    def __len__(self) -> int:
        return len(self.paths)

    def identity(self) -> list[str]:
        """The names of the photos, independent of their content and folder."""
        return list(self.paths)

    def states(self) -> States:
        """The current state; another size means another photo, another time means that contents must be compared."""
        found = np.full((len(self.paths), 2), -1, dtype=np.int64)
        for row, path in zip(found, self.paths, strict=True):
            try:
                state = os.stat(f"{self.root}/{path}")  # noqa: PTH116 - a third of the time, for each of a million files
            except OSError:
                continue
            row[:] = state.st_size, state.st_mtime_ns
        return found

    def content(self, index: int) -> bytes:
        """The encoded photo. May raise anything that is wrong with it."""
        return read_photo(f"{self.root}/{self.paths[index]}", self.max_file_size)

    source = content


@dataclass(frozen=True)
class StoredPhotos:
    """Many photos in each of some files, such as shards."""

    name: str
    """Begins the name of the cache file."""
    count: int
    """Of photos."""
    files: Sequence[Path]
    """All that hold them; none where they are in memory."""
    words: Sequence[str]
    """Further words that identify the selected contents."""
    source: Callable[[int], bytes | str | Path]
    """Gives an encoded photo, or where it lies outside of these files."""

    def __len__(self) -> int:
        return self.count

    def identity(self) -> list[str]:
        """The names of the files and what is selected of them."""
        return [str(self.count), *(file.name for file in self.files), *self.words]

    def states(self) -> States:
        """Those of the files together, so that a change of one asks for a look at every photo."""
        try:
            found = [file.stat() for file in self.files]
        except OSError:
            return np.full((self.count, 2), -1, dtype=np.int64)
        times = np.array([state.st_mtime_ns for state in found], dtype=np.int64).tobytes()
        time = int.from_bytes(hashlib.blake2b(times, digest_size=7).digest(), "little")
        size = sum(state.st_size for state in found)
        return np.tile(np.array([size, time], dtype=np.int64), (self.count, 1))

    def content(self, index: int) -> bytes:
        """The encoded photo; what lies outside could change unseen, so it is not kept."""
        found = self.source(index)
        if not isinstance(found, bytes):
            raise DataError(f"the photo is outside of the set, in {found}")
        return found


PhotoStore = FolderPhotos | StoredPhotos

logger = logging.getLogger(__name__)

Tell = Callable[[int, int], None]
"""Called with the numbers of decoded photos and of all; (0, all) while another process decodes them."""

_AT_ONCE = 8
_DIGEST = 16
_RESERVE, _LARGEST_RESERVE = 0.05, 10e9
"""Part of a disk that is left free, and bytes that suffice on a large one."""


def _build(file: Path, photos: PhotoStore, kept_as: CacheFormat, workers: int, tell: Tell) -> None:
    """Writes the file, which appears when it is whole; ``ConfigError`` where the disk has not enough room."""
    state, count = photos.states(), len(photos)
    rows: list[npt.NDArray[np.int64]] = []
    digests: list[npt.NDArray[np.uint8]] = []
    logger.info("%d photos are decoded once, into %s", count, file)
    loader = EvaluationLoader(_Decoded(photos, kept_as), micro_batch_size=_AT_ONCE, workers=workers)
    with closing(loader), writing(file) as writer:
        for content, sizes, table, digest in (part.data for part in loader):
            _check_room(file, writer, sum(map(len, rows)), count)
            try:
                writer.append(content.numpy(), sizes.tolist())
            except OSError as error:
                raise ConfigError(
                    f"Cannot write the decoded photos to {file}: {error}. Give data.cache a folder with more "
                    "room, or false."
                ) from error
            rows.append(table.numpy())
            digests.append(digest.numpy())
            tell(sum(map(len, rows)), count)
        writer.finish({"rows": np.concatenate(rows), "digests": np.concatenate(digests), "states": state})
        logger.info("The decoded photos take %s", format_bytes(writer.written))


def content_digest(content: bytes) -> npt.NDArray[np.uint8]:
    """BLAKE2b of a file's content, 16 bytes."""
    return np.frombuffer(hashlib.blake2b(content, digest_size=_DIGEST).digest(), dtype=np.uint8)


class _Decoded(Dataset[Any]):
    """The records of all photos, read in blocks."""

    def __init__(self, photos: PhotoStore, kept_as: CacheFormat) -> None:
        self._photos, self._kept_as = photos, kept_as

    def __len__(self) -> int:
        return len(self._photos)

    def get_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, ...]:
        """All bytes; their number, row and digest for each photo."""
        kept, rows, digests = zip(*map(self._decode, indices.tolist()), strict=True)
        return (
            torch.from_numpy(np.concatenate(kept)),
            torch.tensor([len(content) for content in kept], dtype=torch.int64),
            torch.tensor(rows, dtype=torch.int64),
            torch.from_numpy(np.stack(digests)),
        )

    def _decode(self, index: int) -> tuple[npt.NDArray[np.uint8], Any, npt.NDArray[np.uint8]]:
        content = b""
        try:
            content = self._photos.content(index)
            parts, row = self._kept_as.encode(open_photo(content))
        except MemoryError:
            raise
        except Exception:  # whatever is wrong with the photo, who reads it from its store will be told
            return np.zeros(0, dtype=np.uint8), ABSENT, content_digest(content)
        kept = np.concatenate([part.reshape(-1) for part in parts])
        return np.pad(kept, (0, -len(kept) % ALIGNMENT)), row, content_digest(content)


def _check_room(file: Path, writer: RecordWriter, done: int, count: int) -> None:
    """Raises ``ConfigError`` early if the disk will be full, judging by the photos so far."""
    if not done:
        return
    disk = shutil.disk_usage(file.parent)
    left = writer.written / done * (count - done)
    reserve = min(_RESERVE * disk.total, _LARGEST_RESERVE)
    if disk.free - left < reserve:
        raise ConfigError(
            f"The {count:,} decoded photos would take about {format_bytes(writer.written + left)}, and {file.parent} "
            f"has {format_bytes(disk.free + writer.written)} free, of which {format_bytes(reserve)} are reserved. "
            "Give data.cache a folder with more room, or false."
        )


_VERSION = 1


class ImageCache:
    """The decoded photos of a set, by number; ``photos`` are read where something is not kept."""

    def __init__(self, records: RecordFile, kept_as: CacheFormat, photos: PhotoStore) -> None:
        self.file = records.path
        self._records, self._kept_as, self._photos = records, kept_as, photos
        self._rows = records.arrays["rows"]
        self._damaged: set[int] = set()

    def photo(self, index: int) -> Photo:
        """The whole photo; from its file where that is not kept."""
        width, height, scales, scalable = self._rows[index].tolist()
        if scales and isinstance(self._kept_as, WholePhotos) and (kept := self._kept(index)) is not None:
            return CachedImage(kept, (width, height, scales, scalable), partial(self._opened, index))
        return self._opened(index)

    def cut_into(self, index: int, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
        """Makes the picture that ``transform`` cuts out of a photo, as ``decode_into`` makes it of the file."""
        kept_as = self._kept_as
        if isinstance(kept_as, FinishedPictures) and kept_as.transform == transform and self._rows[index, 2]:
            kept = self._kept(index)
            if kept is not None:
                np.copyto(out.numpy(), kept[: out.numel()].reshape(out.shape))
                return
        cut_into(self.photo(index), transform, uniforms, out)

    def _kept(self, index: int) -> npt.NDArray[np.uint8] | None:
        """The bytes that are kept of a photo; None where they were altered, which is said once."""
        kept = self._records.verified(index)
        if kept is None and index not in self._damaged:
            self._damaged.add(index)
            logger.warning(
                "The decoded photo %d in %s is damaged; it is decoded again. Check the disk, and remove the file to "
                "have it made anew.",
                index,
                self.file,
            )
        return kept

    def _opened(self, index: int) -> Photo:
        return open_photo(self._photos.source(index))


def open_cache(
    photos: PhotoStore, transform: Transform | None, folder: Path, *, workers: int, tell: Tell
) -> ImageCache:
    """The decoded photos, from the file in ``folder`` that was made of them with these settings, else a new one.

    One process makes it and others wait. A file is remade once a photo's content has changed; where only times have,
    the contents are compared. See ``EncodedPairs.use_cache`` for the arguments and errors.
    """
    kept_as = cache_format(transform)
    settings = json.dumps([_VERSION, kept_as.settings(), photos.identity()], sort_keys=True)
    key = hashlib.blake2b(settings.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    file = folder / f"{photos.name}-{key}.photos"
    records = _current(file, photos)
    if records is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot create {folder}: {error}. Give data.cache another folder.") from error
        with lock_file(file.with_suffix(".lock"), lambda: tell(0, len(photos))):
            records = _current(file, photos)
            if records is None:
                _build(file, photos, kept_as, workers, tell)
                records = RecordFile(file)
    return ImageCache(records, kept_as, photos)


def default_folder() -> Path:
    """The user's folder for things that can be made again, after the XDG rules; ``ConfigError`` without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"
    except RuntimeError as error:
        raise ConfigError("This user has no home folder for the cache. Give data.cache a folder.") from error


def _current(file: Path, photos: PhotoStore) -> RecordFile | None:
    """The file, if it is complete and the photos have not changed since."""
    try:
        records = RecordFile(file)
    except (OSError, ValueError):
        return None
    noted, found = records.arrays["states"], photos.states()
    if noted.shape != found.shape or not np.array_equal(noted[:, 0], found[:, 0]):
        return None
    for index in np.flatnonzero(noted[:, 1] != found[:, 1]).tolist():
        try:
            content = photos.content(index)
        except Exception:  # as when it was decoded: nothing of it is kept
            content = b""
        if not np.array_equal(content_digest(content), records.arrays["digests"][index]):
            return None
    return records
