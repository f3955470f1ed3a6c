"""Lets a debugger join a rank that runs already: the rank is asked by a signal, and serves the debugger itself.

No process is stopped or written into from outside, so it works where ptrace is forbidden, as it is in most containers.

    lockstep debug --attach   ask file, signal ──────────────────> answer file
    the rank                                   listen on loopback ──> answer file
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import FrameType

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.debugger import listen
from lockstep.launch.runs import RunOnHost, signal_process
from lockstep.world import World

ASK: int = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else 0
"""Asks a rank to serve a debugger; 0 on systems without real-time signals."""
_DEBUGGED = "debugged"
_LOOK_EVERY = 0.05


def answer_asks(world: World) -> None:
    """Makes this rank answer from now on; nothing where Lockstep's launcher did not start it.

    The answer comes between two lines of Python: a rank that waits in a collective answers when it goes on.
    """
    if not world.run_directory or not ASK:
        return
    directory = Path(world.run_directory)

    def answer(number: int, frame: FrameType | None) -> None:
        try:
            said = {"address": listen(world.rank, int(_ask_file(directory, world.rank).read_text()))}
        except LockstepError as error:
            said = {"refused": str(error)}
        _write(_answer_file(directory, world.rank), json.dumps(said))

    signal.signal(ASK, answer)


def ask_to_listen(run: RunOnHost, rank: int, port: int, within: float) -> str:
    """The address at which a rank of a run of this user serves debuggers from now on.

    Args:
        run: of this user, on this host.
        rank: which one.
        port: where it shall listen, on loopback; of no account where it listens already.
        within: seconds to wait for its answer.

    Raises:
        ConfigError: the rank does not run, does not answer, or cannot listen.
    """
    answer = _answer_file(run.directory, rank)
    if not answer.exists():
        beat = run.beats.get(rank)
        if beat is None or not ASK:
            raise ConfigError(f"Rank {rank} cannot be asked: it has not begun, or there is no such rank.")
        _write(_ask_file(run.directory, rank), str(port))
        (run.directory / _DEBUGGED).touch(mode=0o600)  # before the rank can stand still
        if not signal_process(run, beat.pid, ASK):
            (run.directory / _DEBUGGED).unlink()
            raise ConfigError(f"Rank {rank} has ended; there is nothing to attach to.")
        _wait_for(answer, rank, within)
    said = json.loads(answer.read_text())
    if "refused" in said:
        answer.unlink()
        raise ConfigError(said["refused"])
    return str(said["address"])


def is_debugged(directory: Path) -> bool:
    """Whether somebody has asked a rank of the run to serve a debugger."""
    return (directory / _DEBUGGED).exists()


def _wait_for(answer: Path, rank: int, within: float) -> None:
    deadline = time.monotonic() + within
    while not answer.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"Rank {rank} has not answered within {within:g} s. A rank that waits in a collective answers when it "
                "goes on; 'lockstep stacks' shows where it stands."
            )
        time.sleep(_LOOK_EVERY)  # the rank cannot notify; it can only write


def _ask_file(directory: Path, rank: int) -> Path:
    return directory / f"debugger-{rank:03}.ask"


def _answer_file(directory: Path, rank: int) -> Path:
    return directory / f"debugger-{rank:03}.answer"


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
