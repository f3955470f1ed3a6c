"""Where the encoded photos of a set are found, by number, and how it is seen that they have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

States = npt.NDArray[np.int64]
"""Of shape (photos, 2): a size and a time of change of what holds each photo; -1 where there is nothing."""


class Photos(Protocol):
    """Encoded photos."""

    @property
    def name(self) -> str:
        """Begins the name of the file that they are kept in."""

    def __len__(self) -> int:
        """How many there are."""

    def identity(self) -> list[str]:
        """Which photos these are, whatever they hold and wherever they lie."""

    def states(self) -> States:
        """As it is now; another size means another photo, and another time that its bytes are to be compared."""

    def source(self, index: int) -> bytes | Path:
        """What is decoded."""

    def content(self, index: int) -> bytes:
        """The same as bytes. May raise anything that is wrong with the photo."""


@dataclass(frozen=True)
class FolderPhotos:
    """A file for each photo."""

    root: Path
    paths: Sequence[str]
    """Below the root."""

    @property
    def name(self) -> str:
        """See ``Photos``."""
        return self.root.name or "photos"

    def __len__(self) -> int:
        return len(self.paths)

    def identity(self) -> list[str]:
        """See ``Photos``."""
        return list(self.paths)

    def states(self) -> States:
        """See ``Photos``."""
        found = np.full((len(self.paths), 2), -1, dtype=np.int64)
        for row, path in zip(found, self.paths, strict=True):
            try:
                state = os.stat(f"{self.root}/{path}")  # noqa: PTH116 - a third of the time, for each of a million files
            except OSError:
                continue
            row[:] = state.st_size, state.st_mtime_ns
        return found

    def source(self, index: int) -> Path:
        """See ``Photos``."""
        return self.root / self.paths[index]

    def content(self, index: int) -> bytes:
        """See ``Photos``."""
        return self.source(index).read_bytes()


@dataclass(frozen=True)
class StoredPhotos:
    """Many photos in each of some files, such as shards."""

    name: str
    """See ``Photos``."""
    count: int
    """Of photos."""
    files: Sequence[Path]
    """All that hold them; none where they are in memory."""
    words: Sequence[str]
    """What else says which of their contents are meant."""
    read: Callable[[int], bytes | Path]
    """Gives an encoded photo, or where it lies outside of these files."""

    def __len__(self) -> int:
        return self.count

    def identity(self) -> list[str]:
        """See ``Photos``."""
        return [str(self.count), *(file.name for file in self.files), *self.words]

    def states(self) -> States:
        """See ``Photos``: the files together, so that a change of one asks for a look at every photo."""
        try:
            found = [file.stat() for file in self.files]
        except OSError:
            return np.full((self.count, 2), -1, dtype=np.int64)
        times = np.array([state.st_mtime_ns for state in found], dtype=np.int64).tobytes()
        time = int.from_bytes(hashlib.blake2b(times, digest_size=7).digest(), "little")
        return np.tile(
            np.array([sum(state.st_size for state in found), time], dtype=np.int64), (self.count, 1)
        )

    def source(self, index: int) -> bytes | Path:
        """See ``Photos``."""
        return self.read(index)

    def content(self, index: int) -> bytes:
        """See ``Photos``; what lies outside could change unseen, so it is not kept."""
        found = self.read(index)
        if isinstance(found, Path):
            raise DataError(f"the photo lies elsewhere, in {found}")
        return found
