"""Standard output and error to which writing never fails: a terminal or pipe that is gone must not end a run.

What a closed terminal or pipe no longer takes goes to ``terminal.log`` in the log folder, from then on also what C++
writes to the same descriptor. Where a log is on a full disk, what does not fit is lost. Only standard output that the
user has sent to a file fails as ever, because a file with a hole would be taken for whole.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lockstep.core.atomic import NOT_WRITABLE
from lockstep.errors import EXIT_DATA, DataError, LockstepError
from lockstep.text import printable

TERMINAL_LOG = "terminal.log"


class LastingFile(io.FileIO):
    """A descriptor for writing, which stays open.

    Args:
        descriptor: of a terminal, pipe, socket or file.
        folder: for ``terminal.log``; None: what a closed terminal or pipe does not take is lost.
        is_result: True if a file must hold everything that is written, so that a full disk raises ``OSError``.
    """

    def __init__(self, descriptor: int, folder: Path | None = None, *, is_result: bool = False) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.folder = folder
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._is_result = is_result

    def write(self, data: Any, /) -> int:
        """Writes what fits and returns how many bytes were written, or are lost."""
        while True:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                if not self._is_file and error.errno not in NOT_WRITABLE:  # /dev/full is no file
                    self._divert()
                    continue
                if self._is_result:
                    raise
                return len(memoryview(data).cast("B"))
            if written is not None:
                return written
            poll = select.poll()  # another program has made the terminal non-blocking
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()

    def _divert(self) -> None:
        """Puts the file in the log folder, or nothing, in the descriptor's place; from then on no write fails."""
        self._is_file, self._is_result = True, False
        places = [os.devnull] if self.folder is None else [str(self.folder / TERMINAL_LOG), os.devnull]
        for place in places:
            with suppress(OSError):
                file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                os.dup2(file, self.fileno())
                os.close(file)
                return


def lasting(stream: TextIO, folder: Path | None, *, is_result: bool = False) -> TextIO:
    """Returns a stream that writes to the same descriptor and does not fail; see ``LastingFile``."""
    with suppress(OSError, ValueError):
        stream.flush()
    raw = LastingFile(stream.fileno(), folder, is_result=is_result)
    raw.name = stream.name
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ERRORS if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=True,
    )


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement of letters that the encoding lacks: the bytes of a file's name, else Python's escapes of them."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


_ERRORS = "lockstep.escaped"
codecs.register_error(_ERRORS, _escaped)


@contextmanager
def lasting_stderr(folder: Path | None = None) -> Iterator[None]:
    """Makes ``sys.stderr`` last within the block; within such a block it sets the folder of ``terminal.log``."""
    former, original = sys.stderr, sys.__stderr__
    raw = getattr(getattr(former, "buffer", None), "raw", None)
    if isinstance(raw, LastingFile):
        raw.folder = folder or raw.folder
    if original is None or former is not original:
        yield  # it lasts already, or is a notebook's, which stays as it is
        return
    sys.stderr = lasting(original, folder)
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = former


def open_standard_streams() -> None:
    """Opens what the parent closed of standard input, output and error, before another file takes such a number.

    Letters that the encoding of standard output lacks are escaped from then on.
    """
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_ERRORS)


def say(line: str) -> None:
    """Prints a line of the supervisor on this host's terminal."""
    print(f"lockstep: {printable(line)}", file=sys.stderr, flush=True)


def print_result(text: str, done: str) -> None:
    """Prints the last lines of a command; where that fails, a ``DataError`` says what is done all the same."""
    try:
        print(text, flush=True)
    except OSError as error:
        what = "but its summary could not be written to standard output"
        raise DataError(f"{done} is complete, {what}: {error.strerror}.") from error


def end_with(error: Exception) -> NoReturn:
    """Ends the process with an error in a function of ``atexit``: one that is raised there changes no exit status.

    That of Lockstep's own errors is theirs; any other, as when a disk is full, is an error of data.
    """
    say(str(error))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code if isinstance(error, LockstepError) else EXIT_DATA)


class PrintableFormatter(logging.Formatter):
    """Shows control characters, which may be in the name of a file, in what Lockstep itself logs."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; another library's as it is."""
        text = super().format(record)
        return printable(text) if record.name.partition(".")[0] == "lockstep" else text


def log_to_terminal(level: int) -> None:
    """Sends what is logged from that level on to standard error, unless the root logger has handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
