"""Hidden temporary entries that say who made them, so that those of dead runs can be told and removed.

    .step-00000450.<place>-<pid>-<start time>-<token>.partial   being written; a rename makes it step-00000450
    .step-00000400.<place>-<pid>-<start time>-<token>.removed   being deleted; no longer seen as a checkpoint

``place`` stands for the boot of a host and, in its second half, for a process namespace, where the pid has a
meaning. What was made in another namespace of the same boot, such as a container that was killed, is known by a
lock that its maker held.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(
    r"\.(?P<name>.+)\.(?P<place>[0-9a-f]{16})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}\.(?:partial|removed)"
)
_FOREIGN_AGE = 3600.0
"""Seconds without a change after which a temporary entry of another host counts as abandoned."""


def hidden(path: Path, purpose: str = "partial") -> Path:
    """A temporary name beside ``path``, marked as this process's."""
    return path.with_name(f".{path.name}.{identity()}-{secrets.token_hex(4)}.{purpose}")


def identity(pid: int | None = None) -> str:
    """``<place>-<pid>-<start time>`` of a process, by default this one; no other process ever has the same."""
    pid = os.getpid() if pid is None else pid
    return f"{_place()}-{pid}-{_start_time(pid)}"


def is_running(identity: str) -> bool | None:
    """True if a process of this host and process namespace runs; None for one of another. ``ValueError`` if invalid."""
    place, pid, start = identity.split("-")
    number, began = int(pid), int(start)
    return _start_time(number) == began if place == _place() else None


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """Makes a hidden folder to be renamed to ``path`` by the caller; removes it if the caller fails."""
    aside = hidden(path)
    aside.mkdir()
    with _held(aside):
        try:
            yield aside
        finally:
            if aside.exists():
                shutil.rmtree(aside, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader sees the old content or the new, and so does one after a crash."""
    with file_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def file_aside(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Yields an empty hidden file to write to; unless the caller fails or removes it, it is then renamed to ``path``.

    ``alone`` says that no other process writes this file now: the hidden name is always the same, so that what a
    killed process left there is overwritten.
    """
    aside = path.with_name(f".{path.name}.partial") if alone else hidden(path)
    aside.touch(0o666, exist_ok=alone)
    with _held(aside):
        try:
            yield aside
            if aside.exists():
                make_durable(aside)
                aside.replace(path)
                make_durable(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Deletes a folder so that it is never seen half deleted under its own name."""
    aside = hidden(path, "removed")
    path.rename(aside)
    with _held(aside):
        shutil.rmtree(aside)


def clean(directory: Path) -> list[Path]:
    """Removes the temporary entries of dead processes from ``directory``, and nothing else; returns them."""
    removed = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _NAME.fullmatch(entry.name)
        if match is None or not _is_left_behind(entry, match):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed.append(entry)
    return removed


@contextmanager
def descriptor_of(path: Path, flags: int) -> Iterator[int]:
    """Opens a file or folder for the block; a file that is made is the user's own."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_durable(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    with descriptor_of(path, os.O_RDONLY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems keep a folder's names durable by themselves and refuse to be asked.
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def _is_left_behind(entry: Path, match: re.Match[str]) -> bool:
    place, here = match["place"], _place()
    if place == here:
        return _start_time(int(match["pid"])) != int(match["start"])
    if place[:8] == here[:8] and not _is_held(entry):
        return True
    return time.time() - entry.lstat().st_mtime > _FOREIGN_AGE


@contextmanager
def _held(entry: Path) -> Iterator[None]:
    """Holds a lock on an entry, which the kernel takes back from a process that is killed."""
    with descriptor_of(entry, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
        with suppress(OSError):  # some network file systems have no such locks: then the age decides
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _is_held(entry: Path) -> bool:
    """True if a process of this boot holds the lock of the entry, or where that is unknown."""
    try:
        with descriptor_of(entry, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of writes to a full or read-only disk, and beyond a quota or the limit on the size of a file."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks, such as Lustre mounted without them."""


@contextmanager
def sole_use(path: Path) -> Iterator[bool]:
    """Keeps other processes that call this out for the block, and yields whether the file system has locks.

    Where it has none, a file ``<path>.owner`` with host, process and start time takes the lock's place; one that a dead
    process of this host left is removed. ``BlockingIOError`` if another process is in, with what to do.
    """
    with descriptor_of(path, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            owner = _lease(path.with_name(f"{path.name}.owner"))
        try:
            yield owner is None
        finally:
            if owner is not None:
                owner.unlink(missing_ok=True)


def told_holder(error: BlockingIOError) -> str:
    """The words of ``sole_use`` for who is in, in brackets; empty where a lock does not tell."""
    is_told = error.errno is not None and error.strerror != os.strerror(error.errno)
    return f" ({error.strerror})" if is_told else ""


def _lease(file: Path) -> Path:
    """Makes the file, in the name of this process."""
    mine = f"{identity()} {socket.gethostname()}"
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as written:
                written.write(mine)
            return file
        try:
            owner, _, host = file.read_text().partition(" ")
            is_dead, pid = is_running(owner) is False, owner.split("-")[1]
        except FileNotFoundError:
            continue
        except ValueError:  # being written, or by something else
            is_dead, pid, host = False, "unknown", "an unknown host"
        if not is_dead:
            raise BlockingIOError(
                errno.EWOULDBLOCK, f"process {pid} on {host} holds {file}; remove that file if it has ended"
            )
        with suppress(FileNotFoundError):  # another process may do the same: one of both renames it
            file.rename(aside := hidden(file, "removed"))
            aside.unlink()


def _place() -> str:
    """Eight digits for the boot of this host, and eight for the process namespace."""
    return _short(Path("/proc/sys/kernel/random/boot_id")) + _short(Path("/proc/self/ns/pid"))


def _short(path: Path) -> str:
    try:
        text = str(path.readlink()) if path.is_symlink() else path.read_text()
    except OSError:
        text = "unknown"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _start_time(pid: int) -> int:
    """The start time of a process in clock ticks since boot; -1 if it is gone, 0 where it is unknown."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1
        except OSError:
            return 0
        return 0
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])
