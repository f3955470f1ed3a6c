"""Stop signals, and the threads that a process waits for before it ends.

In a rank, ``install`` turns signals into the stop flag that every rank of the run sees; the supervisor collects those
that it receives in a ``SignalInbox``:

SIGINT                                 stop at the step boundary, as Ctrl-C does
SIGTERM, SIGUSR1, SIGUSR2, SIGHUP      preemption: save, stop, exit 75
SIGTERM while the supervisor ends      exit now
a second one, without a supervisor     exit now

A rank waits for its ``CriticalThread`` objects, such as checkpoint writers, even if it ends with an error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from lockstep.runtime.control import Control, Stopped, StopReason

REASONS = {
    signal.SIGINT: StopReason.INTERRUPTED,
    signal.SIGTERM: StopReason.PREEMPTED,
    signal.SIGUSR1: StopReason.PREEMPTED,
    signal.SIGUSR2: StopReason.PREEMPTED,
    signal.SIGHUP: StopReason.PREEMPTED,
}
"""The stop reason of each signal."""


class Ended(SystemExit):
    """Raised in a rank that the supervisor ends; ``finally`` blocks have three seconds to run."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def install(control: Control, *, alone: bool = False) -> None:
    """Installs the signal handlers, from the main thread; an ignored signal stays ignored.

    ``alone``: no supervisor of ours ends the process, so the second signal does.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        again = alone and control.reason is not StopReason.NONE
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again or control.ending:
            raise Ended
        control.request_stop(REASONS[signal.Signals(number)])

    _keep_from_children(_handle(REASONS, handle))
    sys.unraisablehook = _UnraisableHook()


def _handle(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Sets the handler of signals but the ignored ones, which stay so (as by ``nohup``); returns the former handlers.

    Outside of the main thread, where Python allows no handlers, signals keep their effect.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def _restore(former: Mapping[signal.Signals, Any]) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)


_OUT_OF_DESTRUCTOR = 0.05
"""Seconds after which ``Ended`` is raised again."""


class _UnraisableHook:
    """Raises ``Ended`` again if a destructor or a generator that is closed has swallowed it, and prints nothing then.

    That happens where a collective fails because its peer was killed, just before this rank is ended.
    """

    def __init__(self) -> None:
        self._former, self._main = sys.unraisablehook, threading.get_ident()

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is Ended:  # once more to this thread, which may wait in a system call
            threading.Timer(_OUT_OF_DESTRUCTOR, signal.pthread_kill, (self._main, signal.SIGTERM)).start()
        else:
            self._former(unraisable)


def _keep_from_children(former: Mapping[signal.Signals, Any]) -> None:
    """Restores the former handlers in forked children, so that a signal to a loader worker stops no rank.

    Signals are blocked during the fork: one that reaches the child before it has restored its handlers would count as
    one to the rank.
    """
    mask = threading.local()

    def hold() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, former)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def restore() -> None:
        signal.set_wakeup_fd(-1)
        _restore(former)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raises ``Stopped`` for a stop signal, in the main thread, for the ``with`` block, in which no rank runs yet.

    The first process of a container ends by no signal that it does not handle.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(REASONS[signal.Signals(number)])

    former = _handle(REASONS.keys() - {signal.SIGINT}, stop)
    try:
        yield
    finally:
        _restore(former)


@contextmanager
def stop_signals_held() -> Iterator[None]:
    """Blocks the stop signals in this thread, and in processes that it starts; they arrive afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REASONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def undo_inherited_signal_settings() -> None:
    """Lets in the signals that the program which started this one has blocked, and no longer ignores SIGCHLD.

    A child whose parent ignores SIGCHLD leaves no exit status. A stop signal that is ignored, as by ``nohup``, stays.
    """
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, *REASONS])
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def nonblocking_pipe() -> tuple[int, int]:
    """Returns the reading and the writing end of a pipe that never blocks, and that started programs do not inherit."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


class SignalInbox:
    """Collects the stop signals while open, and restores the former handlers when closed."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []
        self._former: dict[signal.Signals, Any] = {}
        self._reader, self._writer = nonblocking_pipe()
        self._former_wakeup = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._former_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._former = _handle(REASONS, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._former)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a signal has arrived."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """Returns the signals since the last call."""
        drain(self._reader)
        taken, self._taken = self._taken, []
        return taken

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._taken.append(signal.Signals(number))


def drain(descriptor: int) -> bytes:
    """Reads all available bytes from a non-blocking descriptor."""
    content = b""
    try:
        while part := os.read(descriptor, 4096):
            content += part
    except BlockingIOError:
        pass
    return content


class CriticalThread(threading.Thread):
    """A thread whose work must be completed, also by a rank that ends with an error, such as writing a checkpoint."""


def wait_for_critical_threads(seconds: float | None = None) -> None:
    """Waits for every ``CriticalThread`` but the calling one, at most ``seconds``, also after SIGTERM."""
    deadline = None if seconds is None else time.monotonic() + seconds
    for thread in threading.enumerate():
        if not isinstance(thread, CriticalThread) or thread is threading.current_thread():
            continue
        if deadline is None:
            thread.join()
            continue
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            with suppress(Ended):
                thread.join(left)
