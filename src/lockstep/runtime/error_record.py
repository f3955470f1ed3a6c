"""The error record of a failing rank: one JSON file in the log folder, which the supervisor's report reads."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.core.world import host_name
from lockstep.errors import EXIT_RANK, LockstepError
from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.stack_dump import Mark, mark_of
from lockstep.runtime.torch_internals import LOST_PEER

_RUNPY = "<frozen runpy>"


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
    """True if it is one of Lockstep's own errors, whose message says what to do."""
    traceback: str
    shown: str
    """The traceback without the launcher's own frames."""
    time: float
    """``time.monotonic()`` when the exception reached the top."""
    exit_code: int

    @property
    def is_consequence(self) -> bool:
        """True if the exception only says that another rank is gone."""
        return not self.on_purpose and LOST_PEER.is_in(self.message)


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
    """Writes the record atomically."""
    path = record_file(directory, record.rank)
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(record), indent=1))
    aside.replace(path)


def read_record(directory: Path, rank: int) -> ErrorRecord | None:
    """Reads the record of a rank, if there is one."""
    try:
        fields = json.loads(record_file(directory, rank).read_text())
    except FileNotFoundError:
        return None
    return ErrorRecord(**{**fields, "samples": tuple(fields["samples"])})


def record_file(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's error record."""
    return directory / f"rank-{rank:03}.error.json"


def log_file(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's output; rank 0 writes to the terminal instead."""
    return directory / f"rank-{rank:03}.log"


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Removes the outer frames up to those that run the target, unless no others are left."""

    def is_launchers(part: TracebackType) -> bool:
        code = part.tb_frame.f_code
        return mark_of(code.co_name) is Mark.RUNS_TARGET or code.co_filename == _RUNPY

    part = frames
    while part is not None and not is_launchers(part):
        part = part.tb_next
    while part is not None and is_launchers(part):
        part = part.tb_next
    return part or frames


def result_file(run_directory: Path, rank: int) -> Path:
    """Returns the path of the return value of a function target."""
    return run_directory / f"result-{rank:03}.json"
