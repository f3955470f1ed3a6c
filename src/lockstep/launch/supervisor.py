"""Starts the ranks of this host and returns how they ended, from a process that never imports torch.

supervise ── with_restarts ──> run_world    once, and again after a lost rank
run_sequentially ────────────> run_world    for commands that need several worlds one after the other
launch ──────────────────────> run_world    for a Python function, from a script or another program
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.checks import file_path
from lockstep.core.atomic import sole_use
from lockstep.core.world import HostLayout
from lockstep.distributed.authentication import write_rank_key
from lockstep.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_RANK,
    EXIT_STALLED,
    ConfigError,
    RankError,
)
from lockstep.launch.fork_server import ServerProcess
from lockstep.launch.hosts import HostCoordinator, Joined
from lockstep.launch.monitor import Watch
from lockstep.launch.options import (
    LaunchOptions,
    parse_devices,
    rank_environment,
    single_host_layout,
    world_environment,
)
from lockstep.launch.outcome import LostRanks, WorldOutcome, furthest_step, judge, report
from lockstep.launch.restarts import find_lost_ranks, with_restarts
from lockstep.launch.runs import run_directory, write_note
from lockstep.launch.stalls import report_stall
from lockstep.launch.targets import EntryTarget, FunctionTarget, Target, to_json
from lockstep.runtime.control import Control, Stopped, StopReason
from lockstep.runtime.error_record import log_file, result_file
from lockstep.runtime.output import TERMINAL_LOG, lasting_stderr, say
from lockstep.runtime.parent_death import end_leftovers
from lockstep.runtime.stop_signals import SignalInbox, nonblocking_pipe
from lockstep.text import printable

_MARK = ".lockstep"
"""A file that marks a log folder as Lockstep's; locked by the run that uses the folder."""


@dataclass
class LogFolder:
    """The folder for output and error records of the ranks of one start."""

    path: Path
    is_kept: bool
    """False for a temporary one, which is removed unless the run failed or its terminal was lost."""

    def keep(self, lines: Sequence[str]) -> None:
        """Keeps the folder, with the report."""
        self.is_kept = True
        with suppress(OSError):
            (self.path / "report.txt").write_text("".join(f"{line}\n" for line in lines), errors="replace")


@contextmanager
def open_log_folder(options: LaunchOptions, layout: HostLayout) -> Iterator[LogFolder]:
    """Makes the log folder: the one asked for, or a temporary one (0700).

    Each host has a folder of its own, because all may share a disk. A folder that another run uses, or that holds files
    named like ours that no run has made, stays as it is: the logs go to a subfolder named after the run's ID.
    """
    with ExitStack() as stack:
        try:
            if options.log_directory:
                asked = Path(options.log_directory, f"host-{layout.node}" if layout.node else "").resolve()
                logs = LogFolder(stack.enter_context(_claimed(asked, layout.run_id)), is_kept=True)
            else:
                made = tempfile.mkdtemp(prefix=f"lockstep-logs-{layout.run_id}-")
                logs = LogFolder(Path(made), is_kept=False)
        except OSError as error:
            asked_for = options.log_directory or tempfile.tempdir  # None where there is no temporary folder
            raise ConfigError(
                f"Cannot create the log folder{f' {asked_for!r}' if asked_for else ''}: {error.strerror}. Choose one "
                "that is writable: TMPDIR, or --logs of lockstep run."
            ) from error
        try:
            yield logs
        finally:
            if not logs.is_kept and not (logs.path / TERMINAL_LOG).exists():
                shutil.rmtree(logs.path, ignore_errors=True)


@contextmanager
def _claimed(asked: Path, run_id: str) -> Iterator[Path]:
    """Makes the folder, or the subfolder that takes its place, and removes the files that an earlier run left there."""
    path = asked
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        is_ours, found = (path / _MARK).exists(), _files_of_ranks(path)
        try:
            if found and not is_ours:
                raise BlockingIOError
            stack.enter_context(sole_use(path / _MARK))
        except BlockingIOError:
            path = asked / run_id
            why = "holds other files" if found and not is_ours else "is used by another run"
            path.mkdir(exist_ok=True)
            stack.enter_context(sole_use(path / _MARK))
            say(f"the log folder {asked} {why}, so the logs of this one are in {path}.")
        for file in _files_of_ranks(path):
            file.unlink()  # of an earlier run, which would be taken for this one's
        for mark in path.glob(f"restart-*/{_MARK}"):
            shutil.rmtree(mark.parent, ignore_errors=True)
        yield path


def _files_of_ranks(path: Path) -> list[Path]:
    return [each for name in ("rank-*.error.json", "rank-*.log", "report.txt") for each in path.glob(name)]


def supervise(target: Target, options: LaunchOptions, joined: Joined | None = None) -> int:
    """Runs the target on every rank of this host, prints the report of a failure, and returns the exit code."""
    outcome = with_restarts(lambda options: run_world(target, options, joined), options)
    for line in () if outcome.is_reported else outcome.lines:
        print(printable(line), file=sys.stderr)
    return outcome.code


def run_world(target: Target, options: LaunchOptions, joined: Joined | None = None) -> WorldOutcome:
    """Runs the target on every rank of this host and waits for the last; only the logs of a failure are kept.

    With other hosts (``joined``) it waits for the ranks of all hosts, and the outcome is the same on each; only the
    results are those of this host's ranks.
    """
    layout = single_host_layout(options) if joined is None else joined.layout
    ranks = range(layout.first_rank, layout.first_rank + options.devices.count)
    with (
        SignalInbox() as inbox,
        open_log_folder(options, layout) as logs,
        lasting_stderr(logs.path),
        run_directory(ranks=ranks) as directory,
        _pipe() as (from_ranks, to_supervisor),
        closing(Control(directory)) as control,
    ):
        write_note(directory, layout.run_id, sys.argv, logs.path, ranks.stop)
        environment = world_environment(options, layout, directory, os.environ)
        coordinator = HostCoordinator(joined, control, directory, logs.path) if joined else None
        if joined is not None:
            write_rank_key(directory, joined.token, layout.run_id)
        with ServerProcess(_order(target, options, layout, logs.path), environment, to_supervisor) as server:
            watch = Watch(server, control, directory, logs.path, options, layout.first_rank, coordinator)
            watch.wait_for_ranks(inbox, from_ranks)
        outcome = replace(_outcome(watch, server, control, directory, logs.path), asked=control.reason)
        if coordinator is not None:
            failed_to_run = watch.broken or (watch.server_lost and not outcome.has_failed)
            fault = (outcome.code, outcome.lines) if failed_to_run else None
            final = coordinator.wait_for_outcome(watch.ends, fault, inbox)
            lost = None if final.lost_at is None else LostRanks(ranks=(), step=final.lost_at)
            outcome = replace(
                outcome,
                code=final.code,
                lines=final.lines,
                has_failed=final.has_failed,
                lost=lost,
                is_reported=coordinator.is_reported,
            )
        if outcome.has_failed or outcome.lost is not None:
            end_leftovers(str(directory))
        if outcome.has_failed:
            logs.keep(outcome.lines)
        return outcome


def _order(target: Target, options: LaunchOptions, layout: HostLayout, logs: Path) -> dict[str, Any]:
    ranks = [
        {
            "rank": (rank := layout.first_rank + local_rank),
            "environment": rank_environment(local_rank, layout),
            "log": str(log_file(logs, rank)) if rank not in (0, options.debug_rank) else "",
            "debug_port": options.debug_port if rank == options.debug_rank else None,
        }
        for local_rank in range(options.devices.count)
    ]
    own = [target.entry.partition(":")[0]] if isinstance(target, EntryTarget) else []
    order = {"preload": [*options.preload, *own], "target": to_json(target)}
    return {**order, "log_directory": str(logs), "ranks": ranks}


def _outcome(watch: Watch, server: ServerProcess, control: Control, directory: Path, logs: Path) -> WorldOutcome:
    if watch.broken:
        return WorldOutcome(code=EXIT_CONFIG, lines=tuple(watch.broken.splitlines()))
    if watch.stall is not None:
        lines = tuple(report_stall(watch.stall.verdict, watch.stall.snapshots, logs))
        return WorldOutcome(code=EXIT_STALLED, lines=lines, has_failed=True)
    verdict = judge(watch.ends, control.reason)
    if watch.server_lost and verdict.cause is None:
        lines = (f"The process that forks the ranks {server.end}, and the ranks with it.",)
        lost = LostRanks(ranks=(), step=furthest_step(watch.ends))
        return WorldOutcome(code=EXIT_RANK, lines=lines, lost=lost)
    lines = tuple(report(verdict, watch.ends, control.reason, logs))
    files = [result_file(directory, end.rank) for end in watch.ends]
    return WorldOutcome(
        code=verdict.code,
        lines=lines,
        has_failed=verdict.cause is not None,
        results=tuple(json.loads(file.read_text()) if file.exists() else None for file in files),
        lost=find_lost_ranks(verdict, watch.ends) if control.reason is StopReason.NONE else None,
    )


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = nonblocking_pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def run_sequentially(
    entry: str,
    payload: dict[str, Any],
    *,
    ranks: int,
    threads: int | None,
    portable: bool = False,
    folder: Path,
) -> WorldOutcome:
    """Runs one world of CPU processes to its end.

    Every rank calls ``entry`` (``module:function``) with the JSON object ``payload``, to which ``folder`` is added: a
    place for what the ranks write, and for their logs. ``threads`` is the number of intra-op threads of each;
    ``portable`` gives them the environment of portable bits. Each world has its own hash seed, so that a result which
    depends on the order of a set of strings shows it.

    Raises:
        SystemExit: the world was asked to stop, and with it the whole command.
    """
    options = LaunchOptions(
        devices=parse_devices(f"cpu:{ranks}"),
        threads=threads,
        portable=portable,
        log_directory=str(folder / "logs"),
        hash_seed="random",
    )
    outcome = run_world(EntryTarget(entry=entry, payload={**payload, "folder": str(folder)}), options)
    if outcome.asked is not StopReason.NONE:
        raise SystemExit(int(outcome.asked))
    return outcome


def launch(
    function: Callable[..., Any],
    *args: Any,
    devices: int | str = "auto",
    threads: int | None = None,
    log_directory: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on one new process per device and returns the results by rank.

    A script must guard the call with ``if __name__ == "__main__":``, because every rank imports the script.
    A failure raises ``RankError`` with the traceback of the rank that failed first.

    Args:
        function: defined at the top level of a file; its result must be representable as JSON.
        args: for the function; anything that can be pickled.
        devices: ``N``, ``auto``, ``cpu``, ``cpu:N`` or a list such as ``0,5``.
        threads: intra-op threads per rank; see ``LaunchOptions``.
        log_directory: where ranks above 0 write their output; see ``LaunchOptions``.
        kwargs: for the function.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"launch() was called on rank {os.environ['RANK']} of a world of {os.environ['WORLD_SIZE']}, which would "
            "start ranks within ranks. Put the call under if __name__ == '__main__':, since every rank imports its "
            "file; in a script that a launcher starts, such as lockstep run, call the function itself."
        )
    if problem := file_path(log_directory):
        raise ConfigError(f"log_directory {problem}")
    target = FunctionTarget.from_function(function, args, kwargs)
    options = LaunchOptions(devices=parse_devices(devices), threads=threads, log_directory=os.fspath(log_directory))
    outcome = run_world(target, options)
    if outcome.code == EXIT_DONE:
        return list(outcome.results)
    if outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.code == EXIT_PREEMPTED:
        raise Stopped(StopReason.PREEMPTED)
    raise RankError("\n".join(outcome.lines))


class CallablePackage(ModuleType):
    """The package ``lockstep.launch``, which can be called like the function of that name.

    Importing any module of the package makes ``lockstep.launch`` the package, so it has to be both.
    """

    def __call__(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        """See ``launch``."""
        return launch(function, *args, **settings)
