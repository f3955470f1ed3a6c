"""Takes away what only Linux has, before anything else is imported."""

import os
import signal
from types import SimpleNamespace

for module, names in (
    (
        os,
        "pidfd_open sched_getaffinity sched_yield memfd_create posix_fallocate posix_fadvise pipe2 waitid eventfd",
    ),
    (signal, "pidfd_send_signal sigtimedwait sigwaitinfo"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

from lockstep.runtime import parent_death  # noqa: E402  # now that those are gone

# The signal of the kernel is asked for by a system call
parent_death.sys = SimpleNamespace(platform="darwin")
