"""The beginning of a file in memory, which processes share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def map_file(path: Path, size: int) -> mmap.mmap:
    """The first ``size`` bytes of a file, which is made if it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
