"""Waits for another process to change a word of shared memory, without burning the processor.

Linux's futex (Franke, Russell and Kirkwood 2002): sleep only if the word still has the value that was seen, and be
woken by whoever changes it. Where there is a core for every waiter, a waiter looks at the word for some milliseconds
first and yields in between. That is not only quicker: a sleeper is woken on the core of the one who wakes it, so two
ranks that take turns sleeping can end up sharing a core for good while another stays idle (seen here as steps of twice
the time); one that stays awake is seen by the scheduler and moved.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time

_SYSCALL = {"x86_64": 202}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOOK_SECONDS = 20e-6
_YIELD_SECONDS = 5e-3
_SLEEP_SECONDS = 0.05


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Whether this machine has the system call, and orders its stores so that data written first is seen first."""
    return platform.system() == "Linux" and platform.machine() in _SYSCALL


class Word:
    """A 32-bit counter in shared memory that one process advances and others wait for.

    Args:
        memory: a writable buffer of four bytes, aligned to four.
    """

    def __init__(self, memory: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = _SYSCALL[platform.machine()]

    @property
    def value(self) -> int:
        """The counter as it stands."""
        return self._word.value

    def advance(self) -> None:
        """Adds one, without waking anyone. Only the owner may call it."""
        self._word.value += 1

    def wake(self) -> None:
        """Wakes everyone who waits for this counter."""
        self._call(self._number, self._address, _WAKE, _ALL, None, None, 0)

    def wait_until(self, reached: int, deadline: float, *, stay_awake: bool = False) -> bool:
        """Waits until the counter is at least ``reached``; false if ``deadline`` (of ``time.monotonic``) passes.

        Args:
            reached: the value to wait for.
            deadline: when to give up.
            stay_awake: there is a core for every waiter, so sleep only after some milliseconds.
        """
        began = time.monotonic()
        while self._word.value < reached and time.monotonic() < began + _LOOK_SECONDS:
            pass
        while stay_awake and self._word.value < reached and time.monotonic() < began + _YIELD_SECONDS:
            os.sched_yield()
        while (seen := self._word.value) < reached:
            if time.monotonic() > deadline:
                return False
            limit = _TimeSpec(0, int(_SLEEP_SECONDS * 1e9))
            self._call(
                self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0
            )
        return True
