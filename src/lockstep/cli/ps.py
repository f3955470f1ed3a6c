"""``lockstep ps``: this user's runs on this host, where they stand, and their processes with memory."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from lockstep.errors import EXIT_DONE
from lockstep.launch.runs import Process, RunOnHost, find_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object per run")


def main(arguments: argparse.Namespace) -> int:
    """Lists the runs and returns the exit status."""
    runs = [(run, run.processes()) for run in find_runs()]
    if arguments.json:
        for run, processes in runs:
            print(json.dumps(_as_dict(run, processes)))
        return EXIT_DONE
    if not runs:
        print("No run of this user on this host.")
    for run, processes in runs:
        _print(run, processes)
    return EXIT_DONE


def _print(run: RunOnHost, processes: list[Process]) -> None:
    total = sum(process.resident for process in processes)
    state = f"command pid {run.supervisor}" if run.is_supervised else "left over: its command was killed"
    age = _duration(time.time() - run.started)
    print(f"{run.run_id}  {run.ranks} ranks, {age}, {_size(total)}, {state}")
    print(f"  {run.command[:110]}")
    ranks = {beat.pid: (rank, beat) for rank, beat in run.beats.items()}
    for process in processes:
        if process.pid in ranks:
            rank, beat = ranks[process.pid]
            silent = _duration(time.monotonic() - beat.time)
            what = f"rank {rank}, {beat.place}, heard of {silent} ago"
        else:
            what = process.command[:80]
        print(f"  {process.pid:>8}  {_size(process.resident):>9}  {what}")


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
            {"pid": process.pid, "rank": ranks.get(process.pid), "resident": process.resident}
            for process in processes
        ],
        "beats": {
            str(rank): {"phase": beat.phase, "epoch": beat.epoch, "step": beat.step}
            for rank, beat in run.beats.items()
        },
    }


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:.1f} GiB"
