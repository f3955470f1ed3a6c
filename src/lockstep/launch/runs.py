"""The run directory of a run, and this user's runs on this host, which are found by their run directories.

The run directory holds rendezvous file, heartbeats and results. It is in memory if possible, private to its owner, and
removed with the run. If the launcher was killed, its lock is free, and the user's next launcher removes the directory
once no process of the run is left.

A process belongs to a run if its environment has the run's id; names and command lines are ignored. It is signalled
through a handle that was opened before the environment was read, so a reused process id is never signalled.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.core.atomic import descriptor_of, identity, is_running
from lockstep.errors import ConfigError
from lockstep.runtime.control import map_file
from lockstep.runtime.error_record import ErrorPage
from lockstep.runtime.heartbeat import SIZE, Beat, heartbeat_file, read_beats
from lockstep.runtime.output import say
from lockstep.runtime.parent_death import has_processes
from lockstep.runtime.process_handle import ProcessHandle, all_pids, hidden
from lockstep.text import format_bytes, printable

_PREFIX = "lockstep-run-"
_LOCK = "lock"
_LONGEST_BASE = 50
"""Bytes; the path of a socket may have 107, of which a run needs up to 55."""


@contextmanager
def run_directory(base: Path | None = None, ranks: range = range(0)) -> Iterator[Path]:
    """Makes the directory (mode 0700), with the files that ranks map, and removes it at the end.

    ``ConfigError`` if no folder has room for it.
    """
    with ExitStack() as stack:
        try:
            base = _base(len(ranks)) if base is None else base
            _remove_abandoned(base)
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            stack.callback(os.close, _held_lock(directory))
            for rank in ranks:
                map_file(heartbeat_file(directory, rank), SIZE).close()
                ErrorPage(directory, rank)
        except OSError as error:
            place = base or tempfile.tempdir or "a temporary folder"
            raise ConfigError(
                f"The files of the run cannot be made in {place}: {error.strerror or error}. Make room there, or set "
                f"XDG_RUNTIME_DIR to a folder with {format_bytes(_room(len(ranks)))} of it; a limit on the size of "
                "files (ulimit -f) must allow that, too."
            ) from error
        yield directory


def run_directories() -> list[Path]:
    """Returns the run directories of this user, in every place that a launcher may use."""
    return [directory for base in _bases() for directory in _own_directories(base)]


def is_in_use(directory: Path) -> bool:
    """True if the launcher of the directory is still running: it holds the lock."""
    try:
        with _locked(directory):
            return False
    except OSError as error:
        return isinstance(error, BlockingIOError)


def _bases() -> list[Path]:
    names = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    with suppress(FileNotFoundError):  # there need not be a folder for temporary files
        names.append(tempfile.gettempdir())
    return [Path(name) for name in dict.fromkeys(names) if name and Path(name).is_dir()]


def _base(ranks: int) -> Path:
    """Returns the first writable folder with room, if possible one whose path is short enough for sockets."""
    writable = [base for base in _bases() if os.access(base, os.W_OK | os.X_OK)]
    usable = [base for base in writable if _has_room(base, ranks)] or writable
    short = (base for base in usable if len(os.fsencode(base)) <= _LONGEST_BASE)
    found = next(short, (usable or [Path(tempfile.gettempdir())])[0])
    if full := [str(base) for base in writable[: writable.index(found)] if not _has_room(base, ranks)]:
        say(f"{' and '.join(full)} has no room left, so the files of the run are in {found}.")
    return found


def _room(ranks: int) -> int:
    """Bytes that a run directory may take."""
    return (4 << 20) + ranks * (1 << 18)


def _has_room(base: Path, ranks: int) -> bool:
    try:
        disk = os.statvfs(base)
    except OSError:
        return False
    has_inodes = disk.f_favail > 16 + 8 * ranks or not disk.f_files
    return has_inodes and disk.f_bavail * disk.f_frsize >= _room(ranks)


def _held_lock(directory: Path) -> int:
    """Locks the file before giving it its name, so that no other launcher finds it unlocked."""
    new = directory / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(directory / _LOCK)
    return descriptor


def _own_directories(base: Path) -> list[Path]:
    found = []
    for directory in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
                found.append(directory)
    return found


def _remove_abandoned(base: Path) -> None:
    for directory in _own_directories(base):
        with suppress(OSError), _locked(directory):  # another launcher may remove the same one
            if not has_processes(str(directory)):  # else it stays for `lockstep clean`
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory; ``BlockingIOError`` if its launcher does, another ``OSError`` if there is none."""
    with descriptor_of(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


_NOTE = "run.json"
_RUN_ID = "LOCKSTEP_RUN_ID"
_LARGEST_NOTE = 1 << 16
_MOST_RANKS = 4096


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    pid: int
    resident: int
    """Bytes of memory that it uses."""
    command: str


@dataclass(frozen=True, kw_only=True)
class RunOnHost:
    """A run that has not ended, or was not cleaned up."""

    run_id: str
    directory: Path
    supervisor: int
    """Process id of the command that started it."""
    started: float
    """Seconds since the epoch."""
    command: str
    logs: str
    ranks: int
    is_supervised: bool
    """True if the command that started it is still running."""
    identity: str
    """Of the command; see ``lockstep.core.atomic.identity``."""
    is_elsewhere: bool
    """True if it was started in another process namespace, such as a container, where process ids differ."""

    @property
    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank."""
        return read_beats(self.directory, range(self.ranks))

    def processes(self) -> list[Process]:
        """Returns all processes of the run but the command itself, by process id."""
        return [process for pid in all_pids() if (process := _process_of(self.run_id, pid)) is not None]


def write_note(directory: Path, run_id: str, command: Sequence[str], logs: Path, ranks: int) -> None:
    """Writes a description of the run to its directory."""
    note = {
        "run_id": run_id,
        "supervisor": os.getpid(),
        "identity": identity(),
        "started": time.time(),
        "command": list(command),
        "logs": str(logs),
        "ranks": ranks,
    }
    (directory / _NOTE).write_text(json.dumps(note))


def find_runs() -> list[RunOnHost]:
    """Returns this user's runs, the oldest first."""
    found = [run for directory in run_directories() if (run := _read(directory)) is not None]
    return sorted(found, key=lambda run: (run.started, run.run_id))


def choose_run(name: str | None) -> RunOnHost:
    """The run whose ID begins or ends with ``name``, or whose folder it is; or the only one. Else ``ConfigError``."""
    runs = find_runs()
    folder = Path(name or ".").resolve()
    meant = [
        run
        for run in runs
        if not name or run.run_id.startswith(name) or run.run_id.endswith(name) or Path(run.logs).parent == folder
    ]
    if len(meant) == 1:
        return meant[0]
    if not runs:
        raise ConfigError("This user has no run on this host ('lockstep ps' lists them).")
    known = ", ".join(run.run_id for run in runs)
    if not name:
        raise ConfigError(f"There are several runs: name one of {known}.")
    fit = f"{len(meant)} runs match" if meant else "No run matches"
    raise ConfigError(
        f"{fit} {name!r}; this user's runs on this host: {known}. A job may be named by its run folder, a script only "
        "by its ID ('lockstep ps' shows the command of each)."
    )


def end_processes(run: RunOnHost) -> int:
    """Sends SIGTERM to all processes of a run, SIGKILL to those left after three seconds; returns how many."""
    ended: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = []
        for pid, handle in _handles(run.run_id, all_pids()):  # one at a time: few may be open
            with handle, suppress(ProcessLookupError):
                handle.send(number)
            found.append(pid)
        ended.update(found)
        deadline = time.monotonic() + 3.0
        for _, handle in _handles(run.run_id, found):
            with handle:
                handle.has_ended(max(0.0, deadline - time.monotonic()))
    return len(ended)


def signal_process(run: RunOnHost, pid: int, number: int) -> bool:
    """Sends a signal to one process of a run; returns False if it has ended or is not of the run."""
    for _, handle in _handles(run.run_id, [pid]):
        with handle, suppress(ProcessLookupError):
            handle.send(number)
            return True
    return False


def remove_run_directory(run: RunOnHost) -> None:
    """Removes the run directory of a run whose command and processes have ended."""
    if not is_in_use(run.directory):
        shutil.rmtree(run.directory, ignore_errors=True)


def _read(directory: Path) -> RunOnHost | None:
    """Reads the run of a directory; None if it is being made or removed, or is not valid."""
    try:
        path = directory / _NOTE
        if path.stat().st_size > _LARGEST_NOTE:
            return None
        note = json.loads(path.read_text())
        return RunOnHost(
            run_id=printable(str(note["run_id"])),
            directory=directory,
            supervisor=int(note["supervisor"]),
            started=float(note["started"]),
            command=" ".join(map(str, note["command"])),
            logs=str(note["logs"]),
            ranks=min(int(note["ranks"]), _MOST_RANKS),
            is_supervised=is_in_use(directory),
            identity=str(note["identity"]),
            is_elsewhere=is_running(str(note["identity"])) is None,
        )
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _process_of(run_id: str, pid: int) -> Process | None:
    """The process, if it is this user's, belongs to the run and has not ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.uids().real != os.getuid() or process.environ().get(_RUN_ID) != run_id:
                return None
            command = " ".join(process.cmdline()).encode(errors="replace").decode().strip()
            return Process(pid, process.memory_info().rss, command) if command else None
    except psutil.Error:  # it has ended, or is another user's
        return None


def _handles(run_id: str, pids: Sequence[int]) -> Iterator[tuple[int, ProcessHandle]]:
    """Yields those processes that belong to a run, with their ids; the caller closes the handles."""
    for pid in pids:
        try:
            handle = ProcessHandle(pid)
        except ProcessLookupError:
            continue
        except OSError as error:
            raise hidden(error) from error
        if pid != os.getpid() and _process_of(run_id, pid) is not None:
            yield pid, handle
        else:
            handle.close()
