"""Decides which samples are for training and which for validation."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import ConfigError, DataError
from lockstep.seeding import derive_seed


def held_out(names: Sequence[str], fraction: float, seed: int, what: str) -> set[str]:
    """The names that are for validation: the ``fraction`` with the smallest keys ``(seed, name)``, rounded.

    At least one is held out and at least one is left. A name's key depends on no other name, so a few files
    more or less move few others.

    Args:
        names: all names, each once.
        fraction: how many of them to hold out, between 0 and 1.
        seed: another seed gives another choice.
        what: names the group in the error that says it is too small.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"A held-out fraction of {fraction:g} was asked for; it must lie between 0 and 1.")
    if len(names) < 2:
        raise DataError(
            f"{what} has {len(names)} sample{'s' * (len(names) != 1)}, "
            "too few to train on some and hold out others. It needs at least 2."
        )
    count = min(max(1, round(len(names) * fraction)), len(names) - 1)
    return set(sorted(names, key=lambda name: (derive_seed(seed, "split", name), name))[:count])
