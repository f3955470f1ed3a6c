"""Starts the ranks of this host and brings back how they ended, from a process that never imports torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_CONFIG, EXIT_RANK, EXIT_STALLED
from lockstep.launch.control import Control, StopReason
from lockstep.launch.hosts import Company, Final, Joined
from lockstep.launch.log_directory import log_directory
from lockstep.launch.options import LaunchOptions, alone, rank_environment, world_environment
from lockstep.launch.place import Place
from lockstep.launch.records import log_file, result_file
from lockstep.launch.recovery import Loss, furthest_step, loss_of, with_restarts
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
    loss: Loss | None = None
    """What was lost, if that is why it ended and it may go better another time."""
    lost_hosts: tuple[int, ...] = ()
    """Numbers of hosts that were lost; the same on every host that is left."""
    asked: StopReason = StopReason.NONE
    """Why it was asked to stop; the number is the exit code of a command that did."""


def supervise(target: Target, options: LaunchOptions, joined: Joined | None = None) -> int:
    """Runs the target on every rank of this host, prints the report if there is one, and returns the exit code."""
    last = with_restarts(lambda options: run_world(target, options, joined), options)
    for line in (*last.outcome.lines, *([last.note] if last.note else [])):
        print(line, file=sys.stderr)
    return int(last.stop) or last.outcome.code


def run_world(target: Target, options: LaunchOptions, joined: Joined | None = None) -> Outcome:
    """Runs the target on every rank of this host and waits for the last; nothing is left but logs of a failure.

    With other hosts (``joined``) it waits for the ranks of all, and the outcome is the same on each, but for
    the results, which are those of this host's ranks.
    """
    place = alone(options) if joined is None else joined.place
    with (
        SignalInbox() as inbox,
        run_directory() as directory,
        log_directory(_log_folder(options, place), place.run_id) as logs,
        _pipe() as (from_ranks, to_supervisor),
        closing(Control(directory)) as control,
    ):
        write_note(directory, place.run_id, sys.argv, logs.path, place.first_rank + options.devices.count)
        environment = world_environment(options, place, directory, os.environ)
        company = Company(joined, control, directory, logs.path) if joined else None
        with ServerProcess(_order(target, options, place, logs.path), environment, to_supervisor) as server:
            watch = Watch(
                *(server, control, directory, logs.path, options),
                first_rank=place.first_rank,
                company=company,
            )
            watch.until_all_ended(inbox, from_ranks)
        outcome = replace(_outcome(watch, control, directory, logs.path), asked=control.reason)
        if company is not None:
            common = _common(company.settle(watch.ends, _fault(watch, outcome), inbox))
            outcome = replace(common, results=outcome.results, asked=outcome.asked)
        logs.keep = logs.keep or outcome.has_failed
        return outcome


def _log_folder(options: LaunchOptions, place: Place) -> str:
    """A folder of its own for each host, which may all see the same disk."""
    if not options.log_directory or not place.node:
        return options.log_directory
    return str(Path(options.log_directory) / f"host-{place.node}")


def _order(target: Target, options: LaunchOptions, place: Place, logs: Path) -> dict[str, Any]:
    ranks = [
        {
            "rank": (rank := place.first_rank + local_rank),
            "environment": rank_environment(local_rank, place),
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


def _outcome(watch: Watch, control: Control, directory: Path, logs: Path) -> Outcome:
    if watch.broken:
        lines = ("No rank was started, because torch cannot be imported:", *watch.broken.splitlines())
        return Outcome(code=EXIT_CONFIG, lines=lines)
    if watch.server_lost:
        lines = ("The process that forks the ranks was killed, and the ranks ended with it.",)
        return Outcome(code=EXIT_RANK, lines=lines, loss=Loss(ranks=(), step=furthest_step(watch.ends)))
    if watch.stall is not None:
        return Outcome(code=EXIT_STALLED, lines=_explain(watch.stall, logs), has_failed=True)
    verdict = judge(watch.ends, control.reason)
    lines = tuple(report(verdict, watch.ends, control.reason, logs))
    files = [result_file(directory, end.rank) for end in watch.ends]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Outcome(
        code=verdict.code,
        lines=lines,
        has_failed=verdict.cause is not None,
        results=tuple(results),
        loss=loss_of(verdict, watch.ends) if control.reason is StopReason.NONE else None,
    )


def _fault(watch: Watch, outcome: Outcome) -> tuple[int, tuple[str, ...]] | None:
    """What kept this host's ranks from running at all, for the other hosts."""
    return (outcome.code, outcome.lines) if watch.broken or watch.server_lost else None


def _common(final: Final) -> Outcome:
    loss = None if final.lost_at is None else Loss(ranks=(), step=final.lost_at)
    return Outcome(
        code=final.code, lines=final.lines, has_failed=final.has_failed, loss=loss, lost_hosts=final.lost
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
