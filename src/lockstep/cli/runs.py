"""``lockstep ps``, ``stacks``, ``stop`` and ``clean``: this user's runs on this host.

lockstep ps       lists the runs with their position, and their processes with their memory; --check: are they well?
lockstep stacks   prints the stack of every rank of a run, which continues undisturbed
lockstep stop     asks the ranks of one run to save and exit, and ends those that do not in time
lockstep clean    ends the processes of runs whose command was killed, and removes their run directories
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from lockstep.cli.shared_options import add_options
from lockstep.core.atomic import is_running
from lockstep.errors import EXIT_DONE, ConfigError
from lockstep.launch.runs import (
    Process,
    RunOnHost,
    choose_run,
    end_processes,
    find_runs,
    remove_run_directory,
)
from lockstep.launch.stalls import snapshot_lines, take_snapshots
from lockstep.runtime.control import Control, StopReason
from lockstep.runtime.heartbeat import Membership
from lockstep.runtime.process_handle import ProcessHandle
from lockstep.text import format_bytes, format_duration, plural, printable

_RUN = ("run", "RUN", "", "ID of the run, its beginning or end, or the run folder of a job (default: the only run)")


def ps(arguments: argparse.Namespace) -> int:
    """Lists the runs, or says whether they are well, and returns the exit status."""
    runs = [(run, run.processes()) for run in find_runs()]
    if arguments.check:
        return _check(runs)
    if arguments.json:
        for run, processes in runs:
            print(json.dumps(_as_dict(run, processes)))
        return EXIT_DONE
    if not runs:
        print("No run of this user on this host.")
    for run, processes in runs:
        _print(run, processes)
    return EXIT_DONE


def _check(runs: list[tuple[RunOnHost, list[Process]]]) -> int:
    """Prints what is wrong, such as for the probe of a container; the exit status is 1 if anything is."""
    wrong = [] if runs else ["no run of this user on this host"]
    for run, processes in runs:
        alive = {process.pid for process in processes}
        beats = run.beats.values()
        silent = len(list(run.directory.glob("heartbeat-*"))) - len(beats)  # of the ranks on this host
        left = (Membership.FINISHED, Membership.INDEPENDENT)
        lost = sum(beat.pid not in alive for beat in beats if beat.membership not in left)
        if not run.is_supervised:
            wrong.append(f"{run.run_id}: its command was killed")
        elif silent:
            wrong.append(f"{run.run_id}: {plural(silent, 'rank')} not yet started")
        elif lost:
            wrong.append(f"{run.run_id}: {plural(lost, 'rank')} ended")
    print("\n".join(wrong or [f"{plural(len(runs), 'run')}, every rank runs."]))
    return 1 if wrong else EXIT_DONE


def _print(run: RunOnHost, processes: list[Process]) -> None:
    total = sum(process.resident for process in processes)
    state = f"command pid {run.supervisor}" if run.is_supervised else "left over: its command was killed"
    if run.is_elsewhere:
        state += ", in another process namespace"
    age = format_duration(time.time() - run.started)
    print(f"{run.run_id}  {plural(run.ranks, 'rank')}, {age}, {format_bytes(total, binary=True)}, {state}")
    print(f"  {printable(run.command[:110])}")
    ranks = {beat.pid: (rank, beat) for rank, beat in run.beats.items()}
    for process in processes:
        if process.pid in ranks:
            rank, beat = ranks[process.pid]
            silent = format_duration(time.monotonic() - beat.time)
            what = f"rank {rank}, {beat.position}, last heartbeat {silent} ago"
        else:
            what = printable(process.command[:80])
        print(f"  {process.pid:>8}  {format_bytes(process.resident, binary=True):>9}  {what}")


def _as_dict(run: RunOnHost, processes: list[Process]) -> dict[str, Any]:
    ranks = {beat.pid: rank for rank, beat in run.beats.items()}
    return {
        "run_id": run.run_id,
        "command": run.command,
        "supervisor": run.supervisor,
        "supervised": run.is_supervised,
        "ranks": run.ranks,
        "started": run.started,
        "logs": run.logs,
        "processes": [
            {"pid": process.pid, "rank": ranks.get(process.pid), "resident": process.resident} for process in processes
        ],
        "beats": {
            str(rank): {"phase": beat.phase, "epoch": beat.epoch, "step": beat.step} for rank, beat in run.beats.items()
        },
    }


def stop(arguments: argparse.Namespace) -> int:
    """Stops the run and returns the exit status."""
    run = choose_run(arguments.run)
    if run.is_elsewhere:
        raise ConfigError(
            f"The run {run.run_id} was started in another process namespace or on another boot, as process "
            f"{run.supervisor} there. Stop it from there, such as with `lockstep stop` in its container."
        )
    print(f"Stopping {run.run_id}: {printable(run.command[:110])}", file=sys.stderr)
    save = run.is_supervised and not arguments.now
    if save and _wait_for(run, arguments.within, signal.SIGTERM):
        print(f"{run.run_id} has stopped.")
        return EXIT_DONE
    with suppress(OSError), closing(Control(run.directory)) as control:  # so that its ranks are not restarted
        control.request_stop(StopReason.PREEMPTED)
    count = end_processes(run)
    if run.is_supervised:
        _wait_for(run, 5.0)
    remove_run_directory(run)
    print(f"{run.run_id} has ended ({plural(count, 'process')}); its last checkpoint stands.", file=sys.stderr)
    return EXIT_DONE


def _wait_for(run: RunOnHost, limit: float, first: signal.Signals | None = None) -> bool:
    """Waits for the command of a run, after a first signal to it; returns True if it exits within the limit."""
    try:
        handle = ProcessHandle(run.supervisor)
    except ProcessLookupError:
        return True
    with handle:
        if not is_running(run.identity):  # its process id belongs to another process now
            return True
        if first is not None:
            handle.send(first)
        return handle.has_ended(limit)


def clean(arguments: argparse.Namespace) -> int:
    """Ends what killed commands left and returns the exit status. Runs whose command is alive are not touched."""
    left = [run for run in find_runs() if not run.is_supervised]
    if not left:
        print("Nothing is left over.")
    for run in left:
        pids = [str(process.pid) for process in run.processes()]
        if run.is_elsewhere and not pids:
            print(f"{run.run_id}: is of another process namespace or boot; clean there, or remove {run.directory}")
            continue
        if arguments.dry_run:
            ending = f"{plural(len(pids), 'process')} ({', '.join(pids) or 'none'})"
            print(f"{run.run_id}: would end {ending}, remove {run.directory}")
            continue
        count = end_processes(run)
        remove_run_directory(run)
        print(f"{run.run_id}: ended {plural(count, 'process')}, removed {run.directory}")
    return EXIT_DONE


def stacks(arguments: argparse.Namespace) -> int:
    """Prints the stacks and returns the exit status."""
    run = choose_run(arguments.run)
    snapshots = take_snapshots(run.directory, {rank: beat.pid for rank, beat in run.beats.items()}, {})
    if not snapshots:
        raise ConfigError(f"The run {run.run_id} has no rank that can answer yet. Try again in a moment.")
    print("\n".join(snapshot_lines(snapshots)))
    return EXIT_DONE


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "ps": (
        lambda parser: add_options(
            parser,
            ("--json", "", False, "print one JSON object per run"),
            ("--check", "", False, "exit with 1 unless there is a run, and every rank of it runs (for probes)"),
        ),
        ps,
    ),
    "stop": (
        lambda parser: add_options(
            parser,
            _RUN,
            ("--within", "SECONDS", 60.0, "time to save and exit"),
            ("--now", "", False, "end the run at once, without a checkpoint"),
        ),
        stop,
    ),
    "clean": (
        lambda parser: add_options(parser, ("--dry-run", "", False, "only print what would be ended")),
        clean,
    ),
    "stacks": (lambda parser: add_options(parser, _RUN), stacks),
}
