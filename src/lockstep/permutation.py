"""Permutes ``0 .. n-1`` by a key, one index at a time, in no memory.

A six-round Feistel network over the next power of four is a bijection there; indices that fall outside ``n`` are
sent through again until they fall inside ("cycle walking", Black and Rogaway 2002), which keeps it a bijection on
``0 .. n-1``. So sample number ``p`` of an epoch over a billion samples costs the same as over ten.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Indices = npt.NDArray[np.int64]


class Permutation:
    """A keyed bijection of ``0 .. size-1``.

    Args:
        size: number of elements, at least 1.
        key: any 64-bit integer; another key gives an unrelated order.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._round_keys = [_mix_int((key + (i + 1) * _GOLDEN) & _MASK) for i in range(_ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """The elements at ``positions`` (int, any shape, each in ``0 .. size-1``), as int64."""
        values = self._encrypt(np.asarray(positions, dtype=np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (mix(right ^ np.uint64(key)) & mask)
        return np.atleast_1d((left << bits) | right)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    return int(mix(np.array([x], dtype=np.uint64))[0])
