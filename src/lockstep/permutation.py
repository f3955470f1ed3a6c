"""Permutes ``0 .. n-1`` by a key, one index at a time, in no memory.

A six-round Feistel network over the next power of four is a bijection there; indices that fall outside ``n`` are
sent through again until they fall inside ("cycle walking", Black and Rogaway 2002), which keeps it a bijection on
``0 .. n-1``. So sample number ``p`` of an epoch over a billion samples costs the same as over ten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_BY_30, _BY_27, _BY_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_TIMES = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_TABLE_PAYS = 4
"""Where the domain has at most so many elements for each one that is wanted, all of it is computed at once."""

Indices = npt.NDArray[np.int64]
_Round = Callable[[Indices], Indices]
"""What a round of the network makes of the right halves; it is added to the left ones."""


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
        keys = [_mix_int((key + (i + 1) * _GOLDEN) & _MASK) for i in range(_ROUNDS)]
        self._round_keys = np.array(keys, dtype=np.uint64)[:, None]

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """The elements at ``positions`` (int, any shape, each in ``0 .. size-1``), as int64."""
        given = np.atleast_1d(np.asarray(positions, dtype=np.int64))
        rounds = self._looked_up if 1 << self._half_bits <= given.size else self._computed
        if 4**self._half_bits <= _TABLE_PAYS * given.size:
            return self._table(rounds())[given]
        return self._walk(given.ravel(), rounds()).reshape(given.shape)

    def _walk(self, values: Indices, rounds: list[_Round]) -> Indices:
        values = self._encrypt(values, rounds)
        (outside,) = np.nonzero(values >= self.size)
        while len(outside):
            walked = self._encrypt(values[outside], rounds)
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values

    def _table(self, rounds: list[_Round]) -> Indices:
        """Where a walk from each element ends: walks of the whole domain at once, twice as far each time.

        One that began outside may never end; nobody asks for it.
        """
        ends = self._encrypt(np.arange(4**self._half_bits, dtype=np.int64), rounds)
        while len(outside := (ends >= self.size).nonzero()[0]) and outside[0] < self.size:
            ends[outside] = ends.take(ends.take(outside))
        return ends

    def _encrypt(self, values: Indices, rounds: list[_Round]) -> Indices:
        left, right = values >> self._half_bits, values & ((1 << self._half_bits) - 1)
        for mixed in rounds:
            left ^= mixed(right)
            left, right = right, left
        left <<= self._half_bits
        left |= right
        return left

    def _computed(self) -> list[_Round]:
        """The rounds, each computed for the halves it is given."""
        return [partial(self._mixed, key) for key in self._round_keys]

    def _looked_up(self) -> list[_Round]:
        """The rounds, computed once for every half there is."""
        halves = np.arange(1 << self._half_bits, dtype=np.int64)
        return [table.take for table in self._mixed(self._round_keys, halves)]

    def _mixed(self, key: npt.NDArray[np.uint64], halves: Indices) -> Indices:
        mixed = mix(halves.view(np.uint64) ^ key)
        mixed &= np.uint64((1 << self._half_bits) - 1)
        return mixed.view(np.int64)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), of an array of one dimension or more."""
    x = x ^ (x >> _BY_30)
    x *= _TIMES[0]
    x ^= x >> _BY_27
    x *= _TIMES[1]
    x ^= x >> _BY_31
    return x


def _mix_int(x: int) -> int:
    """The same of one number; NumPy would cost more for six."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
