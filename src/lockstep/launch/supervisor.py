"""Starts the ranks of this host and brings back how they ended, from a process that never imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_CONFIG, EXIT_RANK, EXIT_STALLED
from lockstep.launch.heartbeat import Control
from lockstep.launch.log_directory import log_directory
from lockstep.launch.options import LaunchOptions, new_run_id, rank_environment, world_environment
from lockstep.launch.records import log_file, result_file
from lockstep.launch.report import report
from lockstep.launch.run_directory import run_directory
from lockstep.launch.runs import write_note
from lockstep.launch.server_process import ServerProcess
from lockstep.launch.signal_inbox import SignalInbox
from lockstep.launch.stalls import Stall, as_json, describe
from lockstep.launch.targets import Target, to_json
from lockstep.launch.verdict import judge
from lockstep.launch.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    code: int
    """The exit code of the command."""
    lines: tuple[str, ...] = ()
    """The report for the terminal."""
    has_failed: bool = False
    """Whether a rank is to blame, so that its log is worth keeping."""
    results: tuple[Any, ...] = ()
    """What a function target returned, by rank; None where it did not return."""


def supervise(target: Target, options: LaunchOptions) -> int:
    """Runs the target on every rank, prints the report if there is one, and returns the exit code."""
    outcome = run_world(target, options)
    for line in outcome.lines:
        print(line, file=sys.stderr)
    return outcome.code


def run_world(target: Target, options: LaunchOptions) -> Outcome:
    """Runs the target on every rank and waits for the last; nothing is left but logs of a failure."""
    run_id = new_run_id()
    with (
        SignalInbox() as inbox,
        run_directory() as directory,
        log_directory(options.log_directory, run_id) as logs,
        _pipe() as (from_ranks, to_supervisor),
        closing(Control(directory)) as control,
    ):
        write_note(directory, run_id, sys.argv, logs.path, options.devices.count)
        environment = world_environment(options, run_id, directory, os.environ)
        with ServerProcess(_order(target, options, logs.path), environment, to_supervisor) as server:
            watch = Watch(server, control, directory, logs.path, options)
            watch.until_all_ended(inbox, from_ranks)
        outcome = _outcome(watch, control, directory, logs.path)
        logs.keep = logs.keep or outcome.has_failed
        return outcome


def _order(target: Target, options: LaunchOptions, logs: Path) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "environment": rank_environment(rank),
            "log": str(log_file(logs, rank)) if rank not in (0, options.debug_rank) else "",
            "debug_port": options.debug_port if rank == options.debug_rank else None,
        }
        for rank in range(options.devices.count)
    ]
    return {
        "preload": list(options.preload),
        "target": to_json(target),
        "log_directory": str(logs),
        "ranks": ranks,
    }


def _outcome(watch: Watch, control: Control, directory: Path, logs: Path) -> Outcome:
    if watch.broken:
        lines = ("No rank was started, because torch cannot be imported:", *watch.broken.splitlines())
        return Outcome(code=EXIT_CONFIG, lines=lines)
    if watch.server_lost:
        lines = ("The process that forks the ranks was killed, and the ranks ended with it.",)
        return Outcome(code=EXIT_RANK, lines=lines)
    if watch.stall is not None:
        return Outcome(code=EXIT_STALLED, lines=_explain(watch.stall, logs), has_failed=True)
    verdict = judge(watch.ends, control.reason)
    lines = tuple(report(verdict, watch.ends, control.reason, logs))
    files = [result_file(directory, end.rank) for end in watch.ends]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Outcome(
        code=verdict.code, lines=lines, has_failed=verdict.cause is not None, results=tuple(results)
    )


def _explain(stall: Stall, logs: Path) -> tuple[str, ...]:
    bundle = logs / "stall.json"
    bundle.write_text(as_json(stall.verdict, stall.sights))
    return tuple(describe(stall.verdict, stall.sights, bundle))


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
