"""The private folder of one run: rendezvous file, heartbeats, results.

It lies in memory where the system has such a place, only its owner may enter, and it goes with the run. A
folder whose launcher was killed is removed by the next launcher of the same user: the lock it held is free
then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "lockstep-run-"
_LOCK = "lock"
_LONGEST_BASE = 50
"""Bytes; the path of a socket may have 107, and those of a run lie up to 55 below."""


@contextmanager
def run_directory(base: Path | None = None) -> Iterator[Path]:
    """Makes the folder (mode 0700) and removes it at the end."""
    base = _base() if base is None else base
    _remove_abandoned(base)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = _held_lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def run_directories() -> list[Path]:
    """The run directories of this user, wherever a launcher may have made them."""
    found = []
    for base in _bases():
        for directory in base.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
                    found.append(directory)
    return found


def is_in_use(directory: Path) -> bool:
    """Whether the launcher that made the folder still runs: it holds the lock."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _bases() -> list[Path]:
    names = (os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", tempfile.gettempdir())
    return [Path(name) for name in dict.fromkeys(names) if name and Path(name).is_dir()]


def _base() -> Path:
    """The first folder that can be written, if possible one whose path is short enough for sockets."""
    usable = [base for base in _bases() if os.access(base, os.W_OK | os.X_OK)]
    short = (base for base in usable if len(os.fsencode(base)) <= _LONGEST_BASE)
    return next(short, (usable or [Path(tempfile.gettempdir())])[0])


def _held_lock(directory: Path) -> int:
    """Takes the lock before giving the file its name, so that no other launcher finds it free."""
    new = directory / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(directory / _LOCK)
    return descriptor


def _remove_abandoned(base: Path) -> None:
    for directory in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another launcher may remove the same one
            if directory.lstat().st_uid == os.getuid():
                _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
