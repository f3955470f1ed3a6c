"""Collects the signals that reach the supervisor, to be read in its loop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from lockstep.launch.stop_signals import REASONS


class SignalInbox:
    """Handles the stop signals while open, and puts the former handlers back when closed.

    A signal that was ignored before (as by ``nohup``) stays ignored. Outside of the main thread, where Python
    allows no handlers, signals keep their effect.
    """

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []
        self._former: dict[signal.Signals, Any] = {}
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former_wakeup = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._former_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in REASONS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a signal arrives."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """The signals since the last call."""
        drain(self._reader)
        taken, self._taken = self._taken, []
        return taken

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._taken.append(signal.Signals(number))


def drain(descriptor: int) -> bytes:
    """Reads what is there from a non-blocking descriptor."""
    content = b""
    try:
        while part := os.read(descriptor, 4096):
            content += part
    except BlockingIOError:
        pass
    return content
