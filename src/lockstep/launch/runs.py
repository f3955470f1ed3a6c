"""This user's runs on this host: found by their run directories, their processes by the run id they inherited.

A process belongs to a run if its environment holds the run's id; names and command lines play no part. It is ended
through a handle of the kernel (pidfd) that was opened before the environment was read, so a number that has been given
to another process since is never signalled.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.beat import Beat, read_beat
from lockstep.launch.run_directory import is_in_use, run_directories

_NOTE = "run.json"
_RUN_ID = "LOCKSTEP_RUN_ID"
_LARGEST_NOTE = 1 << 16
_MOST_RANKS = 4096


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    pid: int
    resident: int
    """Bytes of memory that it holds."""
    command: str


@dataclass(frozen=True, kw_only=True)
class RunOnHost:
    """A run that has not ended, or has left something behind."""

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
    """Whether the command that started it still runs; if not, what is left of it is left over."""

    @property
    def beats(self) -> dict[int, Beat]:
        """The last heartbeat of each rank."""
        found = {rank: read_beat(self.directory, rank) for rank in range(self.ranks)}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def processes(self) -> list[Process]:
        """All processes of the run but the command itself, by process id."""
        return [process for pid in _own_processes() if (process := _process_of(self.run_id, pid)) is not None]


def write_note(directory: Path, run_id: str, command: Sequence[str], logs: Path, ranks: int) -> None:
    """Says in the run directory what runs there."""
    note = {
        "run_id": run_id,
        "supervisor": os.getpid(),
        "started": time.time(),
        "command": list(command),
        "logs": str(logs),
        "ranks": ranks,
    }
    (directory / _NOTE).write_text(json.dumps(note))


def find_runs() -> list[RunOnHost]:
    """This user's runs, the oldest first."""
    found = [run for directory in run_directories() if (run := _read(directory)) is not None]
    return sorted(found, key=lambda run: (run.started, run.run_id))


def choose_run(name: str | None) -> RunOnHost:
    """The run whose id is, or begins or ends with, ``name``; without a name the only one that runs.

    Raises:
        ConfigError: no run, or more than one, is meant.
    """
    runs = find_runs()
    meant = [run for run in runs if not name or run.run_id.startswith(name) or run.run_id.endswith(name)]
    if len(meant) == 1:
        return meant[0]
    if not runs:
        raise ConfigError("No run of this user is on this host ('lockstep ps' lists them).")
    known = ", ".join(run.run_id for run in runs)
    if not name:
        raise ConfigError(f"Say which run is meant; this user's runs on this host: {known}.")
    fit = f"{len(meant)} runs fit" if meant else "No run fits"
    raise ConfigError(f"{fit} {name!r}; this user's runs on this host: {known}.")


def end_processes(run: RunOnHost, *, within: float = 3.0) -> int:
    """Sends SIGTERM to all processes of a run, SIGKILL to those left after ``within`` seconds; returns how many."""
    ended: set[int] = set()
    for number, limit in ((signal.SIGTERM, within), (signal.SIGKILL, within)):
        handles = list(_handles(run.run_id))
        ended.update(pid for pid, _ in handles)
        for _, handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        _wait([handle for _, handle in handles], limit)
    return len(ended)


def signal_process(run: RunOnHost, pid: int, number: int) -> bool:
    """Sends a signal to one process of a run; False, and nothing is sent, where it is none of it or has ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _process_of(run.run_id, pid) is None:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def remove_left_over(run: RunOnHost) -> None:
    """Removes the run directory of a run whose command and processes have ended."""
    if not is_in_use(run.directory):
        shutil.rmtree(run.directory, ignore_errors=True)


def _read(directory: Path) -> RunOnHost | None:
    """The run of a directory; None if it is being made or removed, or its note is none."""
    try:
        path = directory / _NOTE
        if path.stat().st_size > _LARGEST_NOTE:
            return None
        note = json.loads(path.read_text())
        return RunOnHost(
            run_id=str(note["run_id"]),
            directory=directory,
            supervisor=int(note["supervisor"]),
            started=float(note["started"]),
            command=" ".join(map(str, note["command"])),
            logs=str(note["logs"]),
            ranks=min(int(note["ranks"]), _MOST_RANKS),
            is_supervised=is_in_use(directory),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_processes() -> list[int]:
    own, found = os.getuid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == own:
                found.append(int(entry.name))
    return sorted(found)


def _process_of(run_id: str, pid: int) -> Process | None:
    """The process, if it belongs to the run and has not ended."""
    folder = Path(f"/proc/{pid}")
    try:
        environment = dict(
            part.partition(b"=")[::2] for part in (folder / "environ").read_bytes().split(b"\0") if part
        )
        if environment.get(_RUN_ID.encode()) != run_id.encode():
            return None
        pages = int((folder / "statm").read_text().split()[1])
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, ValueError, IndexError):
        return None
    if not command:  # ended, and not waited for yet
        return None
    return Process(pid, pages * os.sysconf("SC_PAGE_SIZE"), command)


def _handles(run_id: str) -> Iterator[tuple[int, int]]:
    """Process id and handle of each process of a run; the caller's list keeps the handles until it has used them."""
    for pid in _own_processes():
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        if pid != os.getpid() and _process_of(run_id, pid) is not None:
            yield pid, handle
        else:
            os.close(handle)


def _wait(handles: Sequence[int], limit: float) -> None:
    """Waits until the processes have ended, and closes their handles."""
    deadline = time.monotonic() + limit
    for handle in handles:
        select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        os.close(handle)
