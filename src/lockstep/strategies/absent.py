"""What is said where code reaches for a parameter that is not whole in its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import ConfigError

_SIGNS = ("meta", "DTensor")
"""What torch's errors name where an operator meets an emptied tensor, or a part of one."""


@contextmanager
def absent_parameters_explained(strategy: str) -> Iterator[None]:
    """Runs the user's forward or loss; says what is wrong where it uses parameters that this process does not hold.

    Raises:
        ConfigError: instead of torch's error about tensors without values, or in parts.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        raise ConfigError(
            "The loss, or a module's forward, uses a parameter of another module, and under strategy "
            f"{strategy!r} it is not whole in this process. Give back what is needed from the forward of the module "
            f"that the parameter belongs to, or use strategy 'ddp'. torch said: {error}"
        ) from error
