"""The error record of a failing rank: one JSON file in the log folder, which the supervisor's report reads.

A disk may be full, or the rank may have no descriptor left. So the record is first written to a page of memory that
was mapped when the rank started, in the run directory.
"""

from __future__ import annotations

import json
import operator
import os
import struct
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.core.users_code import PACKAGE, is_users_file
from lockstep.core.world import host_name
from lockstep.errors import EXIT_RANK, ConfigError, LockstepError
from lockstep.runtime.control import map_file
from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.stack_dump import Mark, mark_of
from lockstep.runtime.torch_internals import LOST_PEER, NO_SCALE, FrameKind, kind_of_frame
from lockstep.text import plural

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
    """The traceback without the launcher's own frames, and without rows of Lockstep's between those of other code."""
    time: float
    """``time.monotonic()`` when the exception reached the top."""
    exit_code: int
    leaves_frames_out: bool = False
    """True if ``shown`` has a row of frames left out."""
    place: str = ""
    """The line of the user's own files that the exception came from, as in ``train.py:41``; empty if there is none."""

    @property
    def is_transient(self) -> bool:
        """True if the exception has a cause outside of the program, so that it may not come again."""
        return not self.on_purpose and is_transient(self.kind, self.message)

    @property
    def is_consequence(self) -> bool:
        """True if the exception only says that another rank is gone.

        Torch and Lockstep raise other types for that; a ``BrokenPipeError`` comes from what the program itself writes.
        """
        return not self.on_purpose and self.kind != "BrokenPipeError" and LOST_PEER.is_in(self.message)


_TRANSIENT = frozenset(
    {
        *("AcceleratorError", "DistBackendError", "DistNetworkError"),
        *("OSError", "TimeoutError"),
        *("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError"),
    }
)
"""Exceptions of a device, a network or a disk, unless the message says that the program caused it:"""
_CAUSED_BY_PROGRAM = ("device-side assert", "out of memory")


def is_transient(kind: str, message: str) -> bool:
    """True for an exception of a device, a network or a disk, after which another attempt may succeed."""
    return kind in _TRANSIENT and not any(sign in message for sign in _CAUSED_BY_PROGRAM)


def users_lines(error: BaseException) -> str:
    """The lines of the user's own files that an exception came through, as in a traceback; each begins a new line.

    Empty where there are none: the frames of Lockstep, Python and installed packages are left out.
    """
    return "".join(f"\n{text.rstrip()}" for text in traceback.format_list(_users_frames(error.__traceback__)))


def _users_frames(frames: TracebackType | None) -> list[traceback.FrameSummary]:
    return [
        each
        for each in traceback.extract_tb(frames)
        if is_users_file(each.filename) and not each.filename.startswith("<")  # which has no lines to show
    ]


def about_own_backward(error: BaseException, beat: Beat | None) -> str:
    """The call to leave out, for torch's error of a ``loss.backward()``, or a GradScaler, beside ``run.backward``.

    Empty for any other error. Without a heartbeat it is that error where none of Lockstep's functions was being called.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_in_loop = beat.phase == "update" if beat else not any(each.filename.startswith(PACKAGE) for each in frames)
    is_of_autograd = bool(frames) and kind_of_frame(frames[-1].filename, frames[-1].name) is FrameKind.AUTOGRAD
    is_known = is_of_autograd or NO_SCALE.is_in(str(error))
    if not (is_in_loop and is_known) or isinstance(error, LockstepError):
        return ""
    own = _users_frames(error.__traceback__)
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return (
        f"run.backward(batch, loss) has computed the gradients of this step. Leave out loss.backward(){place}, and a "
        "GradScaler of your own: lockstep.init(precision='fp16') scales the loss."
    )


class _UsersStack(traceback.StackSummary):
    """The frames of a traceback, with one line in place of each row of Lockstep's own."""

    def __init__(self, frames: Iterable[traceback.FrameSummary]) -> None:
        super().__init__(frames)
        self._rows: dict[int, int] = {}
        """The length of each row by its first frame, and 0 for its other frames."""
        row: list[traceback.FrameSummary] = []
        called: list[traceback.FrameSummary] = []  # of Python and packages, part of the row if they call Lockstep again
        for frame in self:
            if frame.filename.startswith(PACKAGE):
                row += [*called, frame]
                called = []
                self._rows |= {id(each): 0 for each in row} | ({id(row[0]): len(row)} if len(row) > 1 else {})
            elif row and not is_users_file(frame.filename):
                called.append(frame)
            else:
                row, called = [], []

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **named: Any) -> str:
        row = self._rows.get(id(frame_summary))
        if row is None:
            return super().format_frame_summary(frame_summary, **named)
        return f"  [{plural(row, 'frame')} of Lockstep]\n" if row else ""


def _without_own_frames(error: traceback.TracebackException) -> traceback.TracebackException:
    """Leaves rows of Lockstep's frames out of a traceback and of its causes' where other code raised the error."""
    parts: list[traceback.TracebackException | None] = [error]
    for part in parts:
        if part is not None:
            if part.stack and not part.stack[-1].filename.startswith(PACKAGE):
                part.stack = _UsersStack(part.stack)
            parts += [part.__cause__, part.__context__]
    return error


_WITHOUT_SAMPLES = ("prepare", "data", "save", "load", "wait", "end", "script")
"""Phases in which the samples of a heartbeat are those of an earlier one."""


def record_of(error: BaseException, *, rank: int, beat: Beat | None) -> ErrorRecord:
    """Describes an exception that reached the top of a rank."""
    if about := about_own_backward(error, beat):
        cause, error = error, ConfigError(about)
        error.__cause__ = cause
    part = _users_part(error.__traceback__)
    own = _users_frames(part)
    part = part if own or not isinstance(error, SyntaxError) else None  # which names the line of a script itself
    shown = "".join(_without_own_frames(traceback.TracebackException(type(error), error, part)).format())
    return ErrorRecord(
        rank=rank,
        host=host_name(),
        pid=os.getpid(),
        phase=beat.phase if beat else "start",
        epoch=beat.epoch if beat else -1,
        step=beat.step if beat else -1,
        samples=beat.samples if beat and beat.phase not in _WITHOUT_SAMPLES else (),
        kind=type(error).__name__,
        message=str(error),
        on_purpose=isinstance(error, LockstepError),
        traceback="".join(traceback.format_exception(error)),
        shown=shown,
        leaves_frames_out=shown != "".join(traceback.format_exception(type(error), error, part)),
        time=time.monotonic(),
        exit_code=error.exit_code if isinstance(error, LockstepError) else EXIT_RANK,
        place=f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "",
    )


def write_record(directory: Path, record: ErrorRecord) -> None:
    """Writes the record atomically; ``OSError`` if it cannot."""
    path = record_file(directory, record.rank)
    aside = path.with_suffix(".new")
    try:
        aside.write_text(json.dumps(asdict(record), indent=1))
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def read_record(directory: Path, rank: int, run_directory: Path | None = None) -> ErrorRecord | None:
    """Reads the record of a rank, if there is one; from its page if it could not write the file."""
    try:
        text = record_file(directory, rank).read_bytes()
    except OSError:
        text = b"" if run_directory is None else _page_text(run_directory, rank)
    try:
        found = json.loads(text)
        record = ErrorRecord(**{**found, "samples": tuple(map(operator.index, found["samples"]))})
    except (ValueError, TypeError, KeyError, RecursionError):  # none, or not a record of ours
        return None
    kinds: dict[str, Any] = {
        "int": int,
        "str": str,
        "bool": bool,
        "float": (int, float),
        "tuple[int, ...]": tuple,
    }
    is_ours = all(isinstance(getattr(record, each.name), kinds[str(each.type)]) for each in fields(record))
    return record if is_ours and 0 < record.exit_code < 256 else None


_PAGE = 1 << 15
_LENGTH = struct.Struct("=q")
_MOST_CHARACTERS = 8000
"""Of each text of a record on a page, of which a character may need six bytes."""


class ErrorPage:
    """Memory of one rank for its error record, which needs neither a disk nor a descriptor once it is mapped."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        self._map = map_file(page_file(run_directory, rank), _PAGE)

    def write(self, record: ErrorRecord) -> None:
        """Writes the record, of long texts the end."""
        limit = _MOST_CHARACTERS
        while len(text := _shortened(record, limit)) > _PAGE - _LENGTH.size:
            limit = max(1, limit // 2)
        self._map[_LENGTH.size : _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._map, 0, len(text))


def _shortened(record: ErrorRecord, limit: int) -> bytes:
    texts = {name: getattr(record, name)[-limit:] for name in ("kind", "shown", "traceback")}
    texts["message"] = record.message[:limit]
    return json.dumps(asdict(replace(record, **texts, samples=record.samples[:64]))).encode()


def _page_text(run_directory: Path, rank: int) -> bytes:
    try:
        content = page_file(run_directory, rank).read_bytes()
    except OSError:
        return b""
    length = _LENGTH.unpack_from(content)[0] if len(content) == _PAGE else 0
    return content[_LENGTH.size : _LENGTH.size + max(0, length)]


def page_file(run_directory: Path, rank: int) -> Path:
    """Returns the path of a rank's page for its error record."""
    return run_directory / f"failure-{rank:03}"


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
