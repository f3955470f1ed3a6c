"""Repeats an attempt with random numbers of its own, and keeps what went otherwise than it may.

Round ``n`` of seed ``s`` draws from ``Random("s.n")``, so any one of them can be run again alone.
"""

import contextlib
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import LockstepError

LONGEST = 20.0
"""Seconds that one attempt may last."""
_WRITES = {
    "os.mkdir": (0, 2), "os.rename": (1, 3), "os.remove": (0, 1), "os.rmdir": (0, 1), "os.symlink": (1, 2),
    "os.link": (1, 3), "os.truncate": (0, None),
}  # fmt: skip
"""Audit event -> where its arguments hold the path that changes, and the folder that it is relative to."""
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")
"""Events of programs that are started, which their first argument names."""
_watching = []


@dataclass
class Explored:
    """The outcomes of many attempts."""

    outcomes: Counter = field(default_factory=Counter)
    findings: list = field(default_factory=list)
    """``(round, what was wrong)``."""


def explore(attempt, *, rounds, seed, folder, first=0):
    """Calls ``attempt(rng, folder)``, which says what came of it or raises; a LockstepError is a refusal.

    Args:
        attempt: writes into the folder only.
        rounds: how many.
        seed: of the random numbers.
        folder: an empty one.
        first: the first round.
    """
    explored = Explored()
    for number in range(first, first + rounds):
        began = time.monotonic()
        with watched(folder) as written, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                explored.outcomes[attempt(random.Random(f"{seed}.{number}"), folder)] += 1
            except LockstepError as error:
                explored.outcomes["refused"] += 1
                if not str(error).strip() or len(str(error)) > 5000:
                    explored.findings.append((number, f"no clear sentence: {str(error)[:200]!r}"))
            except Exception:
                explored.findings.append((number, traceback.format_exc()))
        if written:
            explored.findings.append((number, f"wrote outside of its folder, or started: {sorted(written)}"))
        if (seconds := time.monotonic() - began) > LONGEST:
            explored.findings.append((number, f"took {seconds:.1f} s"))
    return explored


@contextlib.contextmanager
def watched(folder):
    """The paths outside of a folder that this process changes meanwhile."""
    if not _watching:
        sys.addaudithook(_hear)  # for the life of the process; it hears only while somebody watches
    written = set()
    _watching.append((os.path.realpath(folder), written))
    try:
        yield written
    finally:
        _watching[-1] = ("", set())


def _hear(event, given):
    if not _watching or not _watching[-1][0]:
        return
    folder, written = _watching[-1]
    path, beside = _changed(event, given)
    if not isinstance(path, str | bytes | os.PathLike):
        return
    start = Path(f"/proc/self/fd/{beside}").readlink() if isinstance(beside, int) and beside >= 0 else Path()
    place = (start / os.fsdecode(path)).resolve()
    if not place.is_relative_to(folder) and place != Path(os.devnull) and "__pycache__" not in place.parts:
        written.add(str(place))


def _changed(event, given):
    """The path that an audited call changes or starts, and the folder it is relative to; None for any other call."""
    if event in _STARTS:
        return given[0], None
    if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return given[0], None
    if event in _WRITES:
        path, beside = _WRITES[event]
        return given[path], None if beside is None else given[beside]
    return None, None
