"""Takes away what only Linux has, before anything else is imported."""

import os
import signal

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
