"""The one file into which all ranks write their part, each when it is ready, under a lock of the file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError
from lockstep.timeline.events import Event

FILE = "timeline.json"
"""Its name in a run's folder."""


def begin(folder: Path) -> None:
    """Makes the file, empty, before any step is trained. One process calls this, before the others may add to it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / FILE, "w") as file:
            json.dump(_trace(), file)
    except OSError as error:
        raise ConfigError(
            f"The timeline that profile asks for cannot be written to '{folder / FILE}': {error.strerror}. "
            "Make room for it there, or choose another run folder."
        ) from error


def add(folder: Path, origin: int, make: Any) -> None:
    """Adds a rank's events; the file is a whole trace before and after. Not collective.

    Args:
        folder: of the run.
        origin: Unix time in nanoseconds that becomes 0 if no rank has been here before.
        make: gives the events, from the origin that all ranks have.

    Raises:
        OSError: it cannot be written.
        ValueError: something else has been written there.
    """
    with _locked(folder / FILE, "r+") as file:
        trace = json.load(file)
        facts = trace["otherData"]
        origin = int(facts.setdefault("unix_nanoseconds_at_0", str(origin)))
        trace["traceEvents"] += make(origin)
        file.seek(0)
        file.write(_text(trace))
        file.truncate()


def read(path: Path) -> list[Event]:
    """The events of a trace.

    Raises:
        ConfigError: it is none, or cannot be read.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        found = trace["traceEvents"]
    except OSError as error:
        raise ConfigError(f"The timeline '{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"'{path}' is no timeline. Give the {FILE} of a run with --profile.") from error
    return list(found)


def _trace() -> dict[str, Any]:
    return {"displayTimeUnit": "ms", "otherData": {}, "traceEvents": []}


def _text(trace: dict[str, Any]) -> str:
    """One event a line, so that a text editor can open it."""
    lines = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    head = json.dumps({name: value for name, value in trace.items() if name != "traceEvents"})
    return f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


@contextmanager
def _locked(path: Path, mode: str) -> Iterator[IO[str]]:
    with path.open("a" if mode == "w" else mode, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if mode == "w":
            os.ftruncate(file.fileno(), 0)
        yield file
