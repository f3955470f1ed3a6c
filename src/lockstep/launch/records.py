"""What a failing rank leaves behind for the report: one JSON file in the log folder."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.errors import EXIT_RANK, LockstepError
from lockstep.launch.beat import Beat
from lockstep.world import host_name

_OWN_FRAMES = ("lockstep/launch/", "<frozen runpy>")


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """How one rank failed, where, and doing what."""

    rank: int
    host: str
    pid: int
    phase: str
    epoch: int
    step: int
    samples: tuple[int, ...]
    kind: str
    """Name of the exception's class."""
    message: str
    on_purpose: bool
    """Whether it is one of Lockstep's own errors, whose message says what to do."""
    traceback: str
    shown: str
    """The traceback without the launcher's own frames."""
    time: float
    """``time.monotonic()`` when the exception reached the top."""
    exit_code: int

    @property
    def is_consequence(self) -> bool:
        """Whether the exception says no more than that another rank has gone."""
        return not self.on_purpose and any(sign in self.message for sign in _SIGNS_OF_A_LOST_PEER)


_SIGNS_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Write error",
    "remote process exited",
    "ncclRemoteError",
    "Socket closed",
)


def record_of(error: BaseException, *, rank: int, beat: Beat | None) -> ErrorRecord:
    """Describes an exception that reached the top of a rank."""
    return ErrorRecord(
        rank=rank,
        host=host_name(),
        pid=os.getpid(),
        phase=beat.phase if beat else "start",
        epoch=beat.epoch if beat else -1,
        step=beat.step if beat else -1,
        samples=beat.samples if beat else (),
        kind=type(error).__name__,
        message=str(error),
        on_purpose=isinstance(error, LockstepError),
        traceback="".join(traceback.format_exception(error)),
        shown="".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))),
        time=time.monotonic(),
        exit_code=error.exit_code if isinstance(error, LockstepError) else EXIT_RANK,
    )


def write_record(directory: Path, record: ErrorRecord) -> None:
    """Writes the record so that a reader finds all of it or nothing."""
    path = record_file(directory, record.rank)
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(record), indent=1))
    aside.replace(path)


def read_record(directory: Path, rank: int) -> ErrorRecord | None:
    """The record of a rank, if it left one."""
    try:
        fields = json.loads(record_file(directory, rank).read_text())
    except FileNotFoundError:
        return None
    return ErrorRecord(**{**fields, "samples": tuple(fields["samples"])})


def record_file(directory: Path, rank: int) -> Path:
    """Where a rank's error record lies."""
    return directory / f"rank-{rank:03}.error.json"


def log_file(directory: Path, rank: int) -> Path:
    """Where a rank's output lies; rank 0 writes to the terminal instead."""
    return directory / f"rank-{rank:03}.log"


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Leaves out the launcher's frames at the top, unless nothing else is there."""
    part = frames
    while part is not None and any(own in part.tb_frame.f_code.co_filename for own in _OWN_FRAMES):
        part = part.tb_next
    return part or frames


def result_file(run_directory: Path, rank: int) -> Path:
    """Where the return value of a function target lies."""
    return run_directory / f"result-{rank:03}.json"
