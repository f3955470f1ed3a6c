"""Restarts a run after a process was lost, as long as it makes progress.

a rank killed by a signal, a lost fork server,       started again, from the run's newest checkpoint
a killed loader worker, a lost connection or GPU
any other exception, an exit code, a stall           not restarted: it would happen again
a loss before the run passed the step of the last    not restarted: the restart gained nothing
Ctrl-C, preemption                                   not restarted
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

from lockstep.errors import EXIT_DONE
from lockstep.launch.options import Devices, LaunchOptions, new_run_id
from lockstep.launch.outcome import LostRanks, RankEnd, Verdict, WorldOutcome, furthest_step
from lockstep.runtime.stop_signals import REASONS, SignalInbox
from lockstep.text import plural, printable


def with_restarts(attempt: Callable[[LaunchOptions], WorldOutcome], options: LaunchOptions) -> WorldOutcome:
    """Runs attempts until one ends without lost ranks, or another would not help; returns the outcome of the last.

    All have the same run id. A restart prints what was lost and what is started; without one the last line says why.
    """
    options = dataclasses.replace(options, run_id=options.run_id or new_run_id())
    first, furthest = options, -2
    with SignalInbox() as inbox:
        while True:
            outcome = attempt(options)
            if (lost := outcome.lost) is None or not options.restarts:
                return outcome
            if objection := _objection(lost, furthest, options):
                return dataclasses.replace(outcome, lines=(*outcome.lines, objection))
            if taken := inbox.take():
                lines = (*outcome.lines, "Not restarted: asked to stop.")
                return dataclasses.replace(outcome, code=int(REASONS[taken[-1]]), lines=lines)
            furthest = lost.step
            options = _next(options, first, lost)
            if not outcome.is_reported:
                text = f"{printable(_summary(outcome.lines))}\n{_announcement(options, first)}"
                print(text, file=sys.stderr, flush=True)


def find_lost_ranks(verdict: Verdict, ends: Sequence[RankEnd]) -> LostRanks | None:
    """Returns the ranks lost by a run that nobody asked to stop; None where a restart would not help."""
    cause = verdict.cause
    if cause is None or verdict.left_early or not _is_transient(cause):
        return None
    failed = [end for end in ends if end.code != EXIT_DONE and not end.ended_by_us]
    lost = sorted(end.rank for end in failed if end is cause or not end.is_consequence)
    return LostRanks(ranks=tuple(lost), step=furthest_step(ends))


def _is_transient(end: RankEnd) -> bool:
    """True if a failure has a cause outside of the program, so that it may not happen again."""
    record = end.record
    if record is None:
        return end.code < 0
    if record.is_consequence:
        return True
    if record.on_purpose:
        return record.kind == "RankError" and "was killed by SIG" in record.message
    return record.is_transient


def _objection(lost: LostRanks, furthest: int, options: LaunchOptions) -> str:
    if lost.step <= furthest:
        step = f" than step {furthest}" if furthest >= 0 else ""
        return f"Not restarted: restart {options.restart} got no further{step}, so another would not either."
    if options.restart >= options.restarts:
        return f"Not restarted: all {options.restarts} restarts are used up."
    return ""


def _next(options: LaunchOptions, first: LaunchOptions, lost: LostRanks) -> LaunchOptions:
    number = options.restart + 1
    logs = f"{first.log_directory}/restart-{number}" if first.log_directory else ""
    devices = options.devices
    if options.restart_world == "remaining":
        devices = _remaining_devices(options, lost.ranks)
    return dataclasses.replace(options, restart=number, log_directory=logs, devices=devices)


def _remaining_devices(options: LaunchOptions, lost: Sequence[int]) -> Devices:
    """Returns the devices of the ranks that were not lost, as many as the target can run on; all if it fits on none."""
    devices, each = options.devices, options.devices.per_rank
    remaining = [rank for rank in range(devices.count) if rank not in lost]
    while remaining and not options.fits(len(remaining)):
        remaining.pop()
    if not remaining:
        return devices
    names = tuple(name for rank in remaining for name in devices.names[rank * each : (rank + 1) * each])
    return dataclasses.replace(devices, names=names)


def _summary(lines: Sequence[str]) -> str:
    """The first line of a report, and the log folder."""
    logs = next((line for line in lines if line.startswith("Logs: ")), "")
    first = lines[0].rstrip(":.") if lines else "A process was lost"
    return f"{first}. {logs}".rstrip()


def _announcement(options: LaunchOptions, first: LaunchOptions) -> str:
    count = options.devices.count
    ranks = plural(count, "rank")
    who = f"the same {ranks}" if count == first.devices.count else f"{ranks} of {first.devices.count}"
    return f"Restart {options.restart} of {options.restarts}: {who}, from the last checkpoint if there is one."
