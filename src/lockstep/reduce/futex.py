"""Waits for another process to change a word of shared memory, without burning the processor.

Linux's futex (Franke, Russell and Kirkwood 2002): sleep only if the word still has the value that was seen, and be
woken by whoever changes it. A waiter looks at the word for a short while first, since on a processor of its own the
answer usually comes within microseconds.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable

_SYSCALL = {"x86_64": 202}
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOOK_SECONDS = 20e-6
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

    def wait_until(self, reached: int, deadline: float, look: Callable[[], float] = time.monotonic) -> bool:
        """Waits until the counter is at least ``reached``; false if ``deadline`` (of ``time.monotonic``) passes."""
        stop_looking = look() + _LOOK_SECONDS
        while self._word.value < reached:
            if look() > stop_looking:
                break
        while (seen := self._word.value) < reached:
            if look() > deadline:
                return False
            limit = _TimeSpec(0, int(_SLEEP_SECONDS * 1e9))
            self._call(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
        return True
