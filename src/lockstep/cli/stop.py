"""``lockstep stop``: stops one run: its ranks save and leave; what does not in time is ended, and nothing else."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from contextlib import closing, suppress

from lockstep.errors import EXIT_DONE
from lockstep.launch.control import Control, StopReason
from lockstep.launch.runs import RunOnHost, choose_run, end_processes, remove_left_over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="its id, or the beginning or end of it (default: the only one)"
    )
    parser.add_argument(
        "--within", type=float, default=60.0, metavar="SECONDS", help="time to save and leave (default: 60)"
    )
    parser.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")


def main(arguments: argparse.Namespace) -> int:
    """Stops the run and returns the exit status."""
    run = choose_run(arguments.run)
    if run.is_supervised and not arguments.now and _ask(run, arguments.within):
        print(f"{run.run_id} has stopped.")
        return EXIT_DONE
    _refuse_restarts(run)
    count = end_processes(run)
    if run.is_supervised:
        _wait_for(run.supervisor, 5.0)
    remove_left_over(run)
    print(f"{run.run_id} has ended ({count} processes); its last checkpoint stands.", file=sys.stderr)
    return EXIT_DONE


def _refuse_restarts(run: RunOnHost) -> None:
    """Says in the run directory that the processes are ended on purpose, so that they are not started again."""
    with suppress(OSError), closing(Control(run.directory)) as control:
        control.request_stop(StopReason.PREEMPTED)


def _ask(run: RunOnHost, within: float) -> bool:
    """Asks the command to save and stop; whether it has ended in time."""
    try:
        handle = os.pidfd_open(run.supervisor)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        return bool(select.select([handle], [], [], within)[0])
    finally:
        os.close(handle)


def _wait_for(pid: int, limit: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([handle], [], [], limit)
    os.close(handle)
