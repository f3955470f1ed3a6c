"""A disk that is full, without filling one."""

import resource
from contextlib import contextmanager


@contextmanager
def largest_file(size):
    """Lets no file of this process grow beyond ``size`` bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
