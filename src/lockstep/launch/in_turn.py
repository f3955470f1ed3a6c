"""Runs worlds of CPU processes one after the other, for a command that needs several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.launch.control import StopReason
from lockstep.launch.devices import parse_devices
from lockstep.launch.options import LaunchOptions
from lockstep.launch.supervisor import Outcome, run_world
from lockstep.launch.targets import EntryTarget


def run_in_turn(
    entry: str, payload: dict[str, Any], *, ranks: int, threads: int | None, folder: Path
) -> Outcome:
    """Runs one world to its end.

    Args:
        entry: ``module:function`` that every rank calls with ``payload``.
        payload: anything that JSON takes; ``folder`` is added to it.
        ranks: how many processes.
        threads: intra-op threads of each.
        folder: for what the ranks write, and for their logs.

    Raises:
        SystemExit: it was asked to stop, which is meant for the command and not for this world alone.
    """
    options = LaunchOptions(
        devices=parse_devices(f"cpu:{ranks}"), threads=threads, log_directory=str(folder / "logs")
    )
    outcome = run_world(EntryTarget(entry=entry, payload={**payload, "folder": str(folder)}), options)
    if outcome.asked is not StopReason.NONE:
        raise SystemExit(int(outcome.asked))
    return outcome
