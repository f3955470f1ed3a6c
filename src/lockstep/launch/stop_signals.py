"""Turns signals to a rank into the stop flag that every rank of the run sees.

SIGINT                                 stop at the step boundary, as Ctrl-C does
SIGTERM, SIGUSR1, SIGUSR2, SIGHUP      the host is wanted back: save, stop, exit 75
SIGTERM while the supervisor ends      leave now
"""

from __future__ import annotations

import signal
from types import FrameType

from lockstep.launch.heartbeat import Control, StopReason

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


def install(control: Control) -> None:
    """Handles the signals in this process, from its main thread; an ignored signal stays ignored."""

    def handle(number: int, frame: FrameType | None) -> None:
        if control.ending:
            raise Ended
        control.request_stop(REASONS[signal.Signals(number)])

    for number in REASONS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
