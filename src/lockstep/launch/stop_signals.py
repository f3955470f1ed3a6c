"""Turns signals to a rank into the stop flag that every rank of the run sees.

SIGINT                                 stop at the step boundary, as Ctrl-C does
SIGTERM, SIGUSR1, SIGUSR2, SIGHUP      the host is wanted back: save, stop, exit 75
SIGTERM while the supervisor ends      leave now
a second one, without a supervisor     leave now
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from lockstep.launch.control import Control, StopReason

REASONS = {
    signal.SIGINT: StopReason.INTERRUPTED,
    signal.SIGTERM: StopReason.PREEMPTED,
    signal.SIGUSR1: StopReason.PREEMPTED,
    signal.SIGUSR2: StopReason.PREEMPTED,
    signal.SIGHUP: StopReason.PREEMPTED,
}
"""What each signal asks for."""


class Ended(SystemExit):
    """Raised in a rank that the supervisor ends; ``finally`` blocks still run, for at most three seconds."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def install(control: Control, *, alone: bool = False) -> None:
    """Handles the signals in this process, from its main thread; an ignored signal stays ignored.

    Args:
        control: takes the stop reason.
        alone: no supervisor of ours ends the process, so the second signal does.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        again = alone and control.reason is not StopReason.NONE
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again or control.ending:
            raise Ended
        control.request_stop(REASONS[signal.Signals(number)])

    former = {number: signal.getsignal(number) for number in REASONS}
    handled = {number: old for number, old in former.items() if old is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, handle)
    _keep_from_children(handled)


def _keep_from_children(former: Mapping[signal.Signals, Any]) -> None:
    """Gives forked children the former handlers, so that a worker which is terminated asks nobody to stop.

    Signals are held back during the fork: one that meets the child before it has changed its handlers would still
    be taken for one to the rank.
    """
    mask = threading.local()

    def hold() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, former)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def restore() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in former.items():
            signal.signal(number, handler)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)
