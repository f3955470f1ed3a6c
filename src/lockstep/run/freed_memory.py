"""Keeps the memory that one step frees for the next, which needs the same again.

glibc gives large freed blocks back to the system at once. A step on a CPU frees all its activations, so every step
would ask for them anew, page by page, and the system would fill each page with zeros first: for ResNet-34 on 32 photos
of 224 pixels that was 290,000 page faults and a tenth of the step (``benchmarks/notes``). Values and their order are
not touched, so neither are the bits.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers of two settings of glibc's ``mallopt``, from ``malloc.h``."""


def keep_freed_memory() -> bool:
    """Asks glibc to hold on to what this process frees; its memory stays at its peak until it ends.

    Returns:
        Whether that could be asked for: False beside another C library, which is left as it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has no such setting
        return False
    # No block is mapped on its own, which would be unmapped when freed; and the end of the heap is never cut off.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
