"""The life of one rank, from the moment it was forked to its exit.

A rank ends in one of four ways, and never by running C++ destructors, which abort where a process group is
open:

    the target returned          threads joined, atexit run, exit 0
    SystemExit 75 or 130         the same: stopped because asked
    SystemExit of another code   exit at once with that code
    any other exception          an error record in the log folder, exit with the error's code

Where it fails or is ended while a checkpoint is on its way, it gives that a moment to become whole.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RANK, ConfigError
from lockstep.launch import stop_signals
from lockstep.launch.answering import answer_from_now_on
from lockstep.launch.attaching import answer_asks
from lockstep.launch.beat import read_beat
from lockstep.launch.debugger import lift_default_limit, wait_for_debugger
from lockstep.launch.heartbeat import Heartbeat
from lockstep.launch.parent_death import arm, arm_future_children
from lockstep.launch.records import record_of, result_file, write_record
from lockstep.launch.run_target import run_target
from lockstep.launch.targets import FunctionTarget, Target
from lockstep.launch.unfinished import wait_for_unfinished
from lockstep.world import World

_LAST_MEETING_SECONDS = 2.0
_LAST_WRITE_SECONDS = 2.5
"""For a checkpoint on its way when a rank fails; the supervisor kills three seconds after it said to end."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """All that a forked process needs to become a rank."""

    rank: int
    parent: int
    """Process id of the fork server."""
    environment: Mapping[str, str]
    log: str
    """File for the rank's output; empty for the rank that keeps the terminal."""
    log_directory: str
    signal_pipe: int
    """Descriptor on which a signal to the rank reaches the supervisor at once, whatever the rank is doing."""
    target: Target
    debug_port: int | None = None
    """Where the rank waits for a debugger before it begins; None: it does not wait."""


def run_rank(task: RankTask) -> NoReturn:
    """Becomes the rank: sets the process up, runs the target, and exits."""
    os.setpgid(0, 0)
    arm(task.parent)
    os.environ.update(task.environment)
    _redirect(task.log)
    world = World.from_environment()
    heartbeat = Heartbeat.open(world)
    stop_signals.install(heartbeat.control)
    os.set_blocking(task.signal_pipe, False)
    signal.set_wakeup_fd(task.signal_pipe, warn_on_full_buffer=False)
    arm_future_children()
    faulthandler.enable()
    _keep_sockets_in(world.run_directory)
    answer_from_now_on(world)
    answer_asks(world)
    _reseed()
    heartbeat.mark("start")
    code = EXIT_RANK
    try:
        code = _run(task, world)
    finally:
        _flush()
        os._exit(code)


def _run(task: RankTask, world: World) -> int:
    try:
        _meet(world)
        lift_default_limit(world)
        if task.debug_port is not None:
            wait_for_debugger(world.rank, task.debug_port)
        _keep_result(task, run_target(task.target))
        _leave()
        return EXIT_DONE
    except SystemExit as ending:
        return _leave_with(ending)
    except BaseException as error:
        beat = read_beat(Path(world.run_directory), world.rank)
        record = record_of(error, rank=world.rank, beat=beat)
        write_record(Path(task.log_directory), record)
        if task.log:
            print(record.traceback, file=sys.stderr)
        wait_for_unfinished(_LAST_WRITE_SECONDS)
        return record.exit_code


def _leave_with(ending: SystemExit) -> int:
    if isinstance(ending, stop_signals.Ended):
        wait_for_unfinished(_LAST_WRITE_SECONDS)
        return int(128 + signal.SIGTERM)
    if ending.code is None or isinstance(ending.code, int):
        code = ending.code or EXIT_DONE
    else:
        print(ending.code, file=sys.stderr)
        code = 1
    if code in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
        _leave()
    return code & 0xFF


def _redirect(log: str) -> None:
    if log:
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(nothing)
        os.close(output)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the fork server's TextIOWrapper


def _keep_sockets_in(run_directory: str) -> None:
    """Tells multiprocessing, and so loaders with workers, where to make sockets.

    A folder whose path is short, and that goes with the run however the rank ends. In ``TMPDIR`` they outlive a kill,
    and where that is deep there is no room for their names.
    """
    own = multiprocessing.current_process()
    own._config["tempdir"] = run_directory  # type: ignore[attr-defined]  # not public; children copy it


def _reseed() -> None:
    """Gives each rank its own NumPy stream, as processes started one by one would have."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _meet(world: World) -> None:
    """Lets a script's own ``init_process_group()`` meet in the run directory, on no port."""
    if world.world_size > 1:
        from lockstep.rendezvous import answer_env

        answer_env(world)


def _keep_result(task: RankTask, result: Any) -> None:
    if not isinstance(task.target, FunctionTarget):
        return
    try:
        text = json.dumps(result)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{task.target.name} returned a {type(result).__name__}, and results come back as JSON: {error}. "
            "Return numbers, strings, lists or dicts; write anything larger to a file."
        ) from error
    result_file(Path(os.environ["LOCKSTEP_RUN_DIRECTORY"]), task.rank).write_text(text)


def end_process(code: int) -> NoReturn:
    """Ends this process as the interpreter would, but without the destructors that may abort it."""
    _finish_program()
    _flush()
    os._exit(code)


def _finish_program() -> None:
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are not daemons
    atexit._run_exitfuncs()


def _leave() -> None:
    """What the interpreter does at the end of a program, up to the destructors."""
    _part_from_open_group()
    _finish_program()


def _part_from_open_group() -> None:
    """Waits for the others where a script forgot ``destroy_process_group``: no last sum is cut off."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    from lockstep.rendezvous import wait_for_all

    with suppress(RuntimeError, ValueError):  # someone failed: the supervisor says who
        wait_for_all(_LAST_MEETING_SECONDS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe must not change the exit code
            stream.flush()
