"""Lets one process of a machine, or of all that share a file system, do something that others then need not do."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import ConfigError

_LOOK_EVERY = 0.1


@contextmanager
def lock_file(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file within the block; whoever dies gives it up.

    Args:
        path: the file; made where it is absent, and left.
        waiting: called ten times a second while another process holds the lock.

    Raises:
        ConfigError: the file cannot be written to, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written to: {error}. Give another folder.") from error
    try:
        while not _taken(descriptor, path):
            waiting()
            time.sleep(_LOOK_EVERY)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ConfigError(
            f"The file system of {path.parent} has no locks ({error}). Give a folder on a local disk."
        ) from error
    return True
