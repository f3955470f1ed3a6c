"""Starts a run again after a process was lost, as long as that leads anywhere.

a rank killed by a signal, a lost fork server,       started again, from the run's newest checkpoint
a killed loader worker, a connection or a GPU lost
any other exception, an exit code, a stall           never: it would come again
the loss comes before a step that was not reached    never again: nothing was gained since the one before
Ctrl-C, preemption                                   never
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lockstep.errors import EXIT_DONE
from lockstep.launch.control import StopReason
from lockstep.launch.devices import Devices
from lockstep.launch.options import LaunchOptions, new_run_id
from lockstep.launch.signal_inbox import SignalInbox
from lockstep.launch.stop_signals import REASONS
from lockstep.launch.verdict import RankEnd, Verdict

_PASSING = frozenset(
    {
        *("AcceleratorError", "DistBackendError", "DistNetworkError"),
        *("OSError", "TimeoutError", "BrokenPipeError"),
        *("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError"),
    }
)
"""Exceptions of a device, a network or a disk. What their message may say and is the user's all the same:"""
_USERS = ("device-side assert", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a run lost, so that another start may bring it further."""

    ranks: tuple[int, ...]
    """Those that were lost, not those that were ended because of them."""
    step: int
    """The furthest step that any rank had begun; -1 where none had, or none says."""


class Attempt(Protocol):
    """How one start of a run ended."""

    @property
    def lines(self) -> tuple[str, ...]: ...  # noqa: D102  # as in the supervisor's Outcome
    @property
    def loss(self) -> Loss | None: ...  # noqa: D102


A = TypeVar("A", bound=Attempt)


@dataclass(frozen=True)
class Recovered(Generic[A]):
    """How the last start of a run ended."""

    outcome: A
    note: str = ""
    """Why it was not started again, where it might have been."""
    stop: StopReason = StopReason.NONE
    """The signal that came between two starts."""


def with_restarts(attempt: Callable[[LaunchOptions], A], options: LaunchOptions) -> Recovered[A]:
    """Makes attempts until one ends in something else than a loss, or something speaks against another.

    Each is announced in two lines: what was lost, and what is started.

    Args:
        attempt: runs the world that the options ask for, to its end.
        options: of the first attempt. All attempts have the same run id.
    """
    options = dataclasses.replace(options, run_id=options.run_id or new_run_id())
    first, furthest = options, -2
    with SignalInbox() as inbox:
        while True:
            outcome = attempt(options)
            loss = outcome.loss
            if loss is None or not options.restarts:
                return Recovered(outcome)
            if objection := _objection(loss, furthest, options):
                return Recovered(outcome, note=objection)
            if taken := inbox.take():
                return Recovered(outcome, note="Not restarted: asked to stop.", stop=REASONS[taken[-1]])
            furthest = loss.step
            options = _next(options, first, loss)
            print(f"{_what(outcome.lines)}\n{_announcement(options, first)}", file=sys.stderr, flush=True)


def loss_of(verdict: Verdict, ends: Sequence[RankEnd]) -> Loss | None:
    """What was lost in a run that nobody asked to stop; None where it ended otherwise, or would end so again."""
    cause = verdict.cause
    if cause is None or verdict.left_early or not _may_pass(cause):
        return None
    lost = [
        end.rank
        for end in ends
        if end.code != EXIT_DONE and not end.ended_by_us and (end is cause or not end.is_consequence)
    ]
    return Loss(ranks=tuple(sorted(lost)), step=furthest_step(ends))


def furthest_step(ends: Sequence[RankEnd]) -> int:
    """The furthest step that any rank had begun; -1 where none had, or none says."""
    return max((end.beat.step for end in ends if end.beat is not None), default=-1)


def _may_pass(end: RankEnd) -> bool:
    """Whether a failure has a cause outside of the program, so that it need not come again."""
    record = end.record
    if record is None:
        return end.code < 0
    if record.is_consequence:
        return True
    if record.on_purpose:
        return record.kind == "RankError" and "was killed by SIG" in record.message
    return record.kind in _PASSING and not any(sign in record.message for sign in _USERS)


def _objection(loss: Loss, furthest: int, options: LaunchOptions) -> str:
    if loss.step <= furthest:
        step = f" than step {furthest}" if furthest >= 0 else ""
        return (
            f"Not restarted: restart {options.restart} came no further{step}, so the next would not either."
        )
    if options.restart >= options.restarts:
        return f"Not restarted: all {options.restarts} restarts are used up."
    return ""


def _next(options: LaunchOptions, first: LaunchOptions, loss: Loss) -> LaunchOptions:
    number = options.restart + 1
    logs = f"{first.log_directory}/restart-{number}" if first.log_directory else ""
    devices = options.devices
    if options.restart_world == "left":
        devices = _devices_left(options, loss.ranks)
    return dataclasses.replace(options, restart=number, log_directory=logs, devices=devices)


def _devices_left(options: LaunchOptions, lost: Sequence[int]) -> Devices:
    """The devices of the ranks that were not lost, or as many of them as the target can run on; all if none are."""
    devices, each = options.devices, options.devices.per_rank
    left = [rank for rank in range(devices.count) if rank not in lost]
    while left and not options.fits(len(left)):
        left.pop()
    if not left:
        return devices
    names = tuple(name for rank in left for name in devices.names[rank * each : (rank + 1) * each])
    return dataclasses.replace(devices, names=names)


def _what(lines: Sequence[str]) -> str:
    """The first line of a report, and where the logs lie."""
    logs = next((line for line in lines if line.startswith("Logs: ")), "")
    first = lines[0].rstrip(":.") if lines else "A process was lost"
    return f"{first}. {logs}".rstrip()


def _announcement(options: LaunchOptions, first: LaunchOptions) -> str:
    count = options.devices.count
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    who = f"the same {ranks}" if count == first.devices.count else f"{ranks} of {first.devices.count}"
    verb = "goes" if count == 1 else "go"
    return f"Restart {options.restart} of {options.restarts}: {who} {verb} on from the last checkpoint."
