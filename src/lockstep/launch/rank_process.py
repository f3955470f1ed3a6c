"""The life of one rank, from the fork to its exit.

``run_rank`` sets the process up, runs the target, and ends in one of four ways. C++ destructors never run, because they
abort while a process group is open:

    the target returned          threads joined, atexit run, exit 0
    SystemExit 75 or 130         the same: stopped because asked
    SystemExit of another code   exit with that code, unless it hides an error of Lockstep
    any other exception          an error record in the log folder, exit with the error's code

An error that has ended the thread in which a script trains counts as the target's; so does an error of Lockstep, or a
request to stop, that has ended any thread.

A rank that fails or is ended while it writes a checkpoint waits a moment for the write to complete.
"""

from __future__ import annotations

import atexit
import base64
import faulthandler
import importlib.machinery
import json
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lockstep.core.world import World
from lockstep.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_RANK,
    ConfigError,
    LockstepError,
    RankError,
)
from lockstep.launch.debugger import lift_default_limit, serve_debug_requests, wait_for_debugger
from lockstep.launch.targets import EntryTarget, FunctionTarget, ScriptTarget, Target, resolve_name
from lockstep.runtime import stop_signals
from lockstep.runtime.control import Stopped
from lockstep.runtime.error_record import ErrorPage, record_of, result_file, users_lines, write_record
from lockstep.runtime.heartbeat import Heartbeat, Membership
from lockstep.runtime.output import PrintableFormatter, lasting
from lockstep.runtime.parent_death import arm, arm_future_children
from lockstep.runtime.stack_dump import Mark, serve_stack_dumps, stack_marker
from lockstep.runtime.stop_signals import wait_for_critical_threads
from lockstep.runtime.torch_internals import made_optimizers, opened_groups

_LAST_BARRIER_SECONDS = 2.0
LAST_WRITE_SECONDS = 2.5
"""Time to finish a checkpoint when a rank fails; the supervisor sends SIGKILL three seconds after SIGTERM."""


@stack_marker(Mark.RUNS_TARGET)
def run_target(target: Target) -> Any:
    """Runs the target to its end and returns what it returned; a script returns None."""
    try:
        if isinstance(target, ScriptTarget):
            return run_script(target)
        if isinstance(target, FunctionTarget):
            return _run_function(target)
        sys.argv = [target.entry]
        module, _, name = target.entry.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        return getattr(importlib.import_module(module), name)(target.payload)
    except SystemExit as ending:
        is_own = type(ending) is SystemExit  # and not asked to stop
        if is_own and ending.code and isinstance(hidden := ending.__context__, LockstepError):
            raise hidden from hidden.__cause__  # the script has caught and printed it, as hydra does
        if not is_own or not isinstance(target, EntryTarget):
            raise
        raise RankError(
            f"The program called sys.exit({ending}) before all was done. It must return.{users_lines(ending)}"
        ) from ending


@stack_marker(Mark.RUNS_TARGET)
def run_script(target: ScriptTarget) -> None:
    """Runs a script as ``python SCRIPT`` or ``python -m MODULE`` would: as a real ``__main__`` module that stays.

    So whatever the script defines can be pickled for its loader workers.
    """
    path = target.path
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if target.module:
        main.__package__ = target.module.rpartition(".")[0]
        main.__spec__ = importlib.machinery.ModuleSpec(target.module, main.__loader__, origin=path)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv = [path, *target.arguments]
    sys.path.insert(0, str(Path.cwd() if target.module else Path(path).resolve().parent))
    exec(code, main.__dict__)


@stack_marker(Mark.RUNS_TARGET)
def _run_function(target: FunctionTarget) -> Any:
    sys.path[:] = target.search_path
    sys.argv = [target.main_path]
    if target.main_path:  # imported as multiprocessing does, so that its guard is false
        main = types.ModuleType("__mp_main__")
        main.__dict__.update(runpy.run_path(target.main_path, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    found = resolve_name(importlib.import_module(target.module), target.name)
    if found is None:
        raise ConfigError(
            f"{target.name} is not defined when {target.main_path or target.module} is imported instead of run. "
            "Define it at the top level, outside of `if __name__ == '__main__':`."
        )
    args, kwargs = pickle.loads(base64.b64decode(target.arguments))
    return found(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Everything that a forked process needs to become a rank."""

    rank: int
    parent: int
    """Process id of the fork server."""
    environment: Mapping[str, str]
    log: str
    """File for the rank's output; empty for the rank that writes to the terminal."""
    log_directory: str
    signal_pipe: int
    """Descriptor that passes signals to the rank on to the supervisor at once, whatever the rank is doing."""
    target: Target
    debug_port: int | None = None
    """Port on which the rank waits for a debugger before it starts; None: it does not wait."""


@stack_marker(Mark.RUNS_RANK)
def run_rank(task: RankTask) -> NoReturn:
    """Becomes the rank: sets the process up, runs the target, and exits."""
    os.setpgid(0, 0)
    arm(task.parent)
    os.environ.update(task.environment)
    _redirect(task.log, Path(task.log_directory))
    world = World.from_environment()
    heartbeat, page = Heartbeat.open(world), ErrorPage(Path(world.run_directory), world.rank)
    stop_signals.install(heartbeat.control)
    os.set_blocking(task.signal_pipe, False)
    signal.set_wakeup_fd(task.signal_pipe, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals.REASONS)  # the fork server has blocked them
    arm_future_children()
    faulthandler.enable()
    if logging.lastResort is not None:  # prints the warnings of a script that sets up no logging
        logging.lastResort.setFormatter(PrintableFormatter())
    # multiprocessing creates the sockets of loader workers there: the path is short, and they are removed with the run
    multiprocessing.current_process()._config["tempdir"] = world.run_directory  # type: ignore[attr-defined]  # not public
    serve_stack_dumps(world)
    serve_debug_requests(world)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # as in processes started one by one
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    heartbeat.mark("start")
    code = EXIT_RANK
    try:
        code = _run(task, world, heartbeat, page)
    finally:
        _flush()
        os._exit(code)


def _run(task: RankTask, world: World, heartbeat: Heartbeat, page: ErrorPage) -> int:
    try:
        from lockstep.distributed.rendezvous import register_env_rendezvous

        register_env_rendezvous(world)
        lift_default_limit(world)
        if task.debug_port is not None:
            wait_for_debugger(world.rank, task.debug_port)
        ended = _endings_of_threads()
        _keep_result(task, run_target(task.target))
        if not ended:
            _leave(task, world, heartbeat)
        if ended:
            raise ended[0]
        return EXIT_DONE
    except SystemExit as ending:
        return _leave_with(ending, task, world, heartbeat)
    except BaseException as error:
        record = record_of(error, rank=world.rank, beat=heartbeat.last)
        page.write(record)
        with suppress(OSError):  # a full disk, or no descriptor is left: the page has it
            write_record(Path(task.log_directory), record)
        if task.log:
            print(record.traceback, file=sys.stderr)
        wait_for_critical_threads(LAST_WRITE_SECONDS)
        return record.exit_code


def _endings_of_threads() -> list[BaseException]:
    """Will hold the errors that end a thread of the script in which it trains; those of Lockstep from any thread."""
    ended = list[BaseException]()
    threading.excepthook = partial(_note_ending, ended, threading.excepthook)
    return ended


def _note_ending(
    ended: list[BaseException],
    former: Callable[[threading.ExceptHookArgs], Any],
    of_thread: threading.ExceptHookArgs,
) -> None:
    error, thread = of_thread.exc_value, of_thread.thread
    is_training = thread is not None and thread.ident == Heartbeat.training_thread
    if isinstance(error, LockstepError | Stopped) or (is_training and isinstance(error, Exception)):
        ended.append(error)
    elif not type(thread).__module__.startswith("tensorboard."):  # its next write raises the error again
        former(of_thread)


def _leave_with(ending: SystemExit, task: RankTask, world: World, heartbeat: Heartbeat) -> int:
    if isinstance(ending, stop_signals.Ended):
        wait_for_critical_threads(LAST_WRITE_SECONDS)
        return int(128 + signal.SIGTERM)
    if ending.code is None or isinstance(ending.code, int):
        code = ending.code or EXIT_DONE
    else:
        print(ending.code, file=sys.stderr)
        code = 1
    if code in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
        _leave(task, world, heartbeat)
    else:
        wait_for_critical_threads(LAST_WRITE_SECONDS)
    return code & 0xFF


def _redirect(log: str, folder: Path) -> None:
    """Sends output to the log, if there is one; writing does not fail where the terminal is gone or a disk is full."""
    if log:
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            file = os.dup(nothing)
        for source, descriptor in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, descriptor)
        os.close(file)
        os.close(nothing)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # a module that was imported may have kept it
        with suppress(AttributeError):
            stream.reconfigure(line_buffering=True)
        lasts = lasting(stream, folder, is_result=name == "stdout" and not log)
        for each in (name, f"__{name}__"):
            setattr(sys, each, lasts)


def _keep_result(task: RankTask, result: Any) -> None:
    if not isinstance(task.target, FunctionTarget):
        return
    try:
        text = json.dumps(result)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{task.target.name} returned a {type(result).__name__}, and results must be JSON: {error}. "
            "Return numbers, strings, lists or dicts; write anything larger to a file."
        ) from error
    result_file(Path(os.environ["LOCKSTEP_RUN_DIRECTORY"]), task.rank).write_text(text)


def end_process(code: int) -> NoReturn:
    """Ends this process as the interpreter does, but without the destructors that may abort it."""
    _finish_program()
    _flush()
    os._exit(code)


def _finish_program() -> None:
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are not daemons
    atexit._run_exitfuncs()


def _leave(task: RankTask, world: World, heartbeat: Heartbeat) -> None:
    """Waits for the others if a script did not destroy its process group, then ends as the interpreter does."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        from lockstep.distributed.rendezvous import wait_for_all

        with suppress(RuntimeError, ValueError):  # another rank failed: the supervisor reports it
            wait_for_all(_LAST_BARRIER_SECONDS)
    elif isinstance(task.target, ScriptTarget) and world.is_main and world.world_size > 1:
        is_outside = (beat := heartbeat.last) is None or beat.membership is Membership.OUTSIDE
        if is_outside and not opened_groups() and made_optimizers():
            print(
                f"Warning: the script opened no process group, so each of the {world.world_size} processes trained a "
                "model of its own, on all the data. To train one model on all of them, call lockstep.init(): lockstep "
                "port SCRIPT lists the lines that change. Or call torch.distributed.init_process_group().",
                file=sys.stderr,
            )
    _finish_program()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe must not change the exit code
            stream.flush()
