"""Seeds that are computed from what they are for, never taken from a stream.

A stream ("the next number") depends on everything drawn before it, so on which samples a rank read and where a run
was resumed. A key does not: the augmentation of a sample depends on ``(seed, epoch, index)``, a dropout mask on
``(seed, step, micro-batch, unit, call)``, on every world size alike. Random state is therefore never stored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from lockstep.errors import ConfigError, DataError
from lockstep.text import plural

_MASK = (1 << 63) - 1
_NUMBER = struct.Struct("<cq").pack


def derive_seed(seed: int, purpose: str, *key: int | str) -> int:
    """A 63-bit seed for one purpose and key, as ``BLAKE2b(seed, purpose, key)``; equal on every platform.

    ``ConfigError`` where the seed is not an integer of 64 bits.
    """
    digest = _begin(seed, purpose)
    for part in key:
        if isinstance(part, str):
            text = part.encode(errors="surrogateescape")  # a file name that is not in UTF-8, as its bytes
            digest.update(_NUMBER(b"s", len(text)) + text)
        else:
            digest.update(_NUMBER(b"i", part))
    return int.from_bytes(digest.digest(), "little") & _MASK


def _begin(seed: int, purpose: str) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=8, person=purpose.encode()[:16])
    try:
        digest.update(struct.pack("<q", seed))
    except struct.error as error:
        raise ConfigError(f"seed={seed!r} is not an integer of 64 bits. Use one such as 0.") from error
    return digest


def sample_seeds(seed: int, epoch: int, indices: Iterable[int]) -> list[int]:
    """The seeds of everything random that happens to samples in ``epoch`` (crops, flips, noise).

    They are ``derive_seed(seed, "sample", epoch, index)``, at a third of the cost: what is common is hashed once.
    """
    common, found = _begin(seed, "sample"), []
    common.update(_NUMBER(b"i", epoch))
    for index in indices:
        digest = common.copy()
        digest.update(_NUMBER(b"i", index))
        found.append(int.from_bytes(digest.digest(), "little") & _MASK)
    return found


def unit_seed(seed: int, step: int, micro_batch: int, unit: str, call: int, segment: int = 0) -> int:
    """The seed of the random numbers a model unit draws.

    Args:
        seed: the run's seed.
        step: global optimizer step, counted over epochs.
        micro_batch: position ``k`` in the global batch.
        unit: the module's name, as in ``named_modules``.
        call: how often the unit was called before, within this micro-batch.
        segment: how many of the unit's children had been left before the draw, within this call.
    """
    return derive_seed(seed, "unit", step, micro_batch, unit, call, segment)


def permutation_key(seed: int, epoch: int) -> int:
    """The key of the order in which an epoch visits the samples."""
    return derive_seed(seed, "permutation", epoch)


def held_out(names: Sequence[str], fraction: float, seed: int, what: str) -> set[str]:
    """The names that are for validation: the ``fraction`` with the smallest keys ``(seed, name)``, rounded.

    At least one is held out and at least one is left; ``what`` names the group in the error that says it is too small.
    A name's key depends on no other name, so a few files more or less move few others.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"A held-out fraction of {fraction:g} was asked for; it must lie between 0 and 1.")
    if len(names) < 2:
        raise DataError(
            f"{what} has {plural(len(names), 'sample')}, "
            "too few to train on some and hold out others. It needs at least 2."
        )
    count = min(max(1, round(len(names) * fraction)), len(names) - 1)
    return set(sorted(names, key=lambda name: (derive_seed(seed, "split", name), name))[:count])
