"""``lockstep clean``: ends the processes of runs whose command was killed, and removes their run directories."""

from __future__ import annotations

import argparse

from lockstep.errors import EXIT_DONE
from lockstep.launch.runs import end_processes, find_runs, remove_left_over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--dry-run", action="store_true", help="only say what would be ended")


def main(arguments: argparse.Namespace) -> int:
    """Cleans up and returns the exit status. Runs whose command is alive are left alone."""
    left = [run for run in find_runs() if not run.is_supervised]
    if not left:
        print("Nothing is left over.")
    for run in left:
        pids = [str(process.pid) for process in run.processes()]
        if arguments.dry_run:
            print(
                f"{run.run_id}: would end {len(pids)} processes ({', '.join(pids) or 'none'}), remove {run.directory}"
            )
            continue
        count = end_processes(run)
        remove_left_over(run)
        print(f"{run.run_id}: ended {count} processes, removed {run.directory}")
    return EXIT_DONE
