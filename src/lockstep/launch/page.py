"""A page of a file in memory, which processes share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

SIZE = 4096


def map_page(path: Path) -> mmap.mmap:
    """The first page of a file, which is made if it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < SIZE:
            os.ftruncate(descriptor, SIZE)
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
