"""Threads whose work a process waits for before it ends, even where it ends with an error."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from lockstep.launch.stop_signals import Ended


class Unfinished(threading.Thread):
    """A thread that writes something which must not be cut off, such as a checkpoint.

    The interpreter waits for it at the end of a program. A rank that ends with an error, or is ended, calls
    ``wait_for_unfinished``.
    """


def wait_for_unfinished(seconds: float | None = None) -> None:
    """Waits for every ``Unfinished`` thread of this process but the one that calls this.

    Args:
        seconds: for all of them together; None waits as long as they take. Being ended by the supervisor meanwhile
            does not shorten a limited wait.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    for thread in threading.enumerate():
        if not isinstance(thread, Unfinished) or thread is threading.current_thread():
            continue
        while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            if deadline is None:
                thread.join()
            else:
                with suppress(Ended):
                    thread.join(max(0.0, deadline - time.monotonic()))
