"""Starts the ranks of this host and returns how they ended, from a process that never imports torch.

supervise ── with_restarts ──> run_world    once, and again after a lost rank
run_sequentially ────────────> run_world    for commands that need several worlds one after the other
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.core.world import HostLayout
from lockstep.errors import EXIT_CONFIG, EXIT_RANK, EXIT_STALLED, ConfigError
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
from lockstep.launch.outcome import LostRanks, WorldOutcome, judge, report
from lockstep.launch.restarts import find_lost_ranks, furthest_step, with_restarts
from lockstep.launch.runs import run_directory, write_note
from lockstep.launch.stalls import Stall, as_json, describe
from lockstep.launch.targets import EntryTarget, Target, to_json
from lockstep.runtime.control import Control, StopReason
from lockstep.runtime.error_record import log_file, result_file
from lockstep.runtime.stop_signals import SignalInbox


@dataclass
class LogDirectory:
    """The folder in which the ranks of one run write their output and error records."""

    path: Path
    keep: bool
    """True if it is kept after the run."""


@contextmanager
def log_directory(asked: str, run_id: str) -> Iterator[LogDirectory]:
    """Opens the folder that was asked for, or a temporary one (0700), which is removed unless ``keep`` is set."""
    if asked:
        path = Path(asked).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Cannot create the log folder {asked!r}: {error.strerror}. Choose a folder that is writable."
            ) from error
        for pattern in (
            "rank-*.error.json",
            "rank-*.log",
        ):  # of an earlier run, which would be taken for this one's
            for file in path.glob(pattern):
                file.unlink()
        yield LogDirectory(path, keep=True)
        return
    logs = LogDirectory(Path(tempfile.mkdtemp(prefix=f"lockstep-logs-{run_id}-")), keep=False)
    try:
        yield logs
    finally:
        if not logs.keep:
            shutil.rmtree(logs.path, ignore_errors=True)


def supervise(target: Target, options: LaunchOptions, joined: Joined | None = None) -> int:
    """Runs the target on every rank of this host, prints the report of a failure, and returns the exit code."""
    last = with_restarts(lambda options: run_world(target, options, joined), options)
    for line in (*last.outcome.lines, *([last.note] if last.note else [])):
        print(line, file=sys.stderr)
    return int(last.stop) or last.outcome.code


def run_world(target: Target, options: LaunchOptions, joined: Joined | None = None) -> WorldOutcome:
    """Runs the target on every rank of this host and waits for the last; only the logs of a failure are kept.

    With other hosts (``joined``) it waits for the ranks of all hosts, and the outcome is the same on each; only the
    results are those of this host's ranks.
    """
    layout = single_host_layout(options) if joined is None else joined.layout
    with (
        SignalInbox() as inbox,
        run_directory() as directory,
        log_directory(_log_folder(options, layout), layout.run_id) as logs,
        _pipe() as (from_ranks, to_supervisor),
        closing(Control(directory)) as control,
    ):
        write_note(directory, layout.run_id, sys.argv, logs.path, layout.first_rank + options.devices.count)
        environment = world_environment(options, layout, directory, os.environ)
        coordinator = HostCoordinator(joined, control, directory, logs.path) if joined else None
        with ServerProcess(_order(target, options, layout, logs.path), environment, to_supervisor) as server:
            watch = Watch(
                *(server, control, directory, logs.path, options),
                first_rank=layout.first_rank,
                coordinator=coordinator,
            )
            watch.wait_for_ranks(inbox, from_ranks)
        outcome = replace(_outcome(watch, control, directory, logs.path), asked=control.reason)
        if coordinator is not None:
            failed_to_run = watch.broken or watch.server_lost
            fault = (outcome.code, outcome.lines) if failed_to_run else None
            final = coordinator.wait_for_outcome(watch.ends, fault, inbox)
            lost = None if final.lost_at is None else LostRanks(ranks=(), step=final.lost_at)
            outcome = replace(
                outcome, code=final.code, lines=final.lines, has_failed=final.has_failed, lost=lost
            )
        logs.keep = logs.keep or outcome.has_failed
        return outcome


def _log_folder(options: LaunchOptions, layout: HostLayout) -> str:
    """Gives each host a folder of its own, because all may share a disk."""
    if not options.log_directory or not layout.node:
        return options.log_directory
    return str(Path(options.log_directory) / f"host-{layout.node}")


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
    return {
        "preload": list(options.preload),
        "target": to_json(target),
        "log_directory": str(logs),
        "ranks": ranks,
    }


def _outcome(watch: Watch, control: Control, directory: Path, logs: Path) -> WorldOutcome:
    if watch.broken:
        lines = ("No rank was started, because importing torch failed:", *watch.broken.splitlines())
        return WorldOutcome(code=EXIT_CONFIG, lines=lines)
    if watch.server_lost:
        lines = ("The process that forks the ranks was killed, and the ranks with it.",)
        return WorldOutcome(
            code=EXIT_RANK, lines=lines, lost=LostRanks(ranks=(), step=furthest_step(watch.ends))
        )
    if watch.stall is not None:
        return WorldOutcome(code=EXIT_STALLED, lines=_explain(watch.stall, logs), has_failed=True)
    verdict = judge(watch.ends, control.reason)
    lines = tuple(report(verdict, watch.ends, control.reason, logs))
    files = [result_file(directory, end.rank) for end in watch.ends]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return WorldOutcome(
        code=verdict.code,
        lines=lines,
        has_failed=verdict.cause is not None,
        results=tuple(results),
        lost=find_lost_ranks(verdict, watch.ends) if control.reason is StopReason.NONE else None,
    )


def _explain(stall: Stall, logs: Path) -> tuple[str, ...]:
    bundle = logs / "stall.json"
    bundle.write_text(as_json(stall.verdict, stall.snapshots))
    return tuple(describe(stall.verdict, stall.snapshots, bundle))


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def run_sequentially(
    entry: str, payload: dict[str, Any], *, ranks: int, threads: int | None, folder: Path
) -> WorldOutcome:
    """Runs one world of CPU processes to its end.

    Args:
        entry: ``module:function`` that every rank calls with ``payload``.
        payload: a JSON object; ``folder`` is added to it.
        ranks: how many processes.
        threads: intra-op threads of each.
        folder: for what the ranks write, and for their logs.

    Raises:
        SystemExit: it was asked to stop, which is meant for the whole command.
    """
    options = LaunchOptions(
        devices=parse_devices(f"cpu:{ranks}"), threads=threads, log_directory=str(folder / "logs")
    )
    outcome = run_world(EntryTarget(entry=entry, payload={**payload, "folder": str(folder)}), options)
    if outcome.asked is not StopReason.NONE:
        raise SystemExit(int(outcome.asked))
    return outcome
