"""The samples of each micro-batch of each step: a pure function, with no state and no rank in it.

    samples of an epoch     p0 p1 p2 p3 p4 p5 p6 p7 | p8 p9 p10            in the keyed order of the epoch
    steps (global batch 8)  |------- step 0 --------| step 1 (ragged) |
    micro-batches (K = 4)   k0    k1    k2    k3      k0    k1  -  -       two of the four are empty: not run

The last batch is cut into full micro-batches first, then a short one; the rest are empty. Nothing is padded and no
sample is seen twice. A rank holds a run of consecutive micro-batches; K, not the number of ranks, decides the sums.

The order is a ``Permutation``: a six-round Feistel network over the next power of four is a bijection there; indices
outside ``n`` are sent through again until they fall inside ("cycle walking", Black and Rogaway 2002), which keeps it a
bijection on ``0 .. n-1``. It takes no memory, and sample ``p`` of a billion costs the same as of ten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lockstep.core.seeding import permutation_key
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_BY_30, _BY_27, _BY_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_TIMES = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_TABLE_PAYS = 4
"""The whole domain is computed at once if it has at most this many elements for each one that is wanted."""

Indices = npt.NDArray[np.int64]
_Round = Callable[[Indices], Indices]
"""A round of the network: a function of the right halves, added to the left ones."""


class Permutation:
    """A keyed bijection of ``0 .. size-1``; another key, of 64 bits, gives an unrelated order."""

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
        rounds: list[_Round] = [partial(self._mixed, key) for key in self._round_keys]
        if 1 << self._half_bits <= given.size:  # then they are computed once, for every half there is
            halves = np.arange(1 << self._half_bits, dtype=np.int64)
            rounds = [table.take for table in self._mixed(self._round_keys, halves)]
        if 4**self._half_bits <= _TABLE_PAYS * given.size:
            return self._table(rounds)[given]
        return self._walk(given.ravel(), rounds).reshape(given.shape)

    def _walk(self, values: Indices, rounds: list[_Round]) -> Indices:
        values = self._encrypt(values, rounds)
        (outside,) = np.nonzero(values >= self.size)
        while len(outside):
            walked = self._encrypt(values[outside], rounds)
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values

    def _table(self, rounds: list[_Round]) -> Indices:
        """The end of the walk from each element: walks of the whole domain at once, twice as far each time.

        A walk that began outside may never end, and is not used.
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


def share(items: int, holders: int, holder: int) -> range:
    """The consecutive items of one holder: floor or ceil of ``items / holders``, the larger shares first."""
    size, larger = divmod(items, holders)
    start = holder * size + min(holder, larger)
    return range(start, start + size + (holder < larger))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of a process in numbered items: the micro-batches of a step, or of an evaluation."""

    holders: int = 1
    """Number of processes that share them."""
    holder: int | None = 0
    """This process's number among them; None for one that computes nothing, such as a parameter server."""
    interleaved: bool = False
    """Take every ``holders``-th item instead of a run of consecutive ones."""
    spare: bool = False
    """Give a holder without an item one spare: the number ``items``, which is run on the samples of item 0 and counts
    for nothing."""
    rounds: bool = False
    """Give every holder the same number of items, for strategies whose forward pass is collective. The surplus numbers
    are spares: they are run on the samples of item 0 and count for nothing. Implies ``interleaved``."""

    def of(self, items: int, holder: int | None = None) -> range:
        """The items of a holder, by default of this process; numbers from ``items`` on are spares."""
        holder = self.holder if holder is None else holder
        if holder is None:
            return range(0)
        if self.rounds:
            return range(holder, -(-items // self.holders) * self.holders, self.holders)
        if self.interleaved:
            return range(holder, items, self.holders)
        own = share(items, self.holders, holder)
        return own if own or not self.spare else range(items, items + 1)

    def longest(self, items: int) -> int:
        """The most items of any holder."""
        return -(-items // self.holders)

    def in_order(self, rows: Tensor, items: int) -> Tensor:
        """A row for each item, shape (items, ...), from those of the holders, shape (holders, longest, ...)."""
        if self.rounds or self.interleaved or self.holders == 1:
            return rows.transpose(0, 1).flatten(0, 1)[:items]
        import torch

        held = [len(share(items, self.holders, holder)) for holder in range(self.holders)]
        return torch.cat([part[:count] for part, count in zip(rows, held)])


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The samples of one optimizer step, and the number of micro-batches in which they are computed."""

    global_batch: int
    """Samples per optimizer step, over all devices together."""
    micro_batches: int
    """K: micro-batches per step. Part of the recipe, like the learning rate."""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.micro_batches < 1:
            raise ConfigError(
                f"global_batch={self.global_batch} and micro_batches={self.micro_batches} must both be at least 1."
            )
        if self.global_batch % self.micro_batches:
            nearest = max(1, round(self.global_batch / self.micro_batches)) * self.micro_batches
            raise ConfigError(
                f"global_batch={self.global_batch} cannot be cut into micro_batches={self.micro_batches} of equal "
                f"size. Choose a multiple of {self.micro_batches}, for example global_batch={nearest}."
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples in a full micro-batch."""
        return self.global_batch // self.micro_batches

    def check_holders(self, holders: int) -> None:
        """Refuses more data-parallel ranks than micro-batches (``ConfigError``)."""
        if holders > self.micro_batches:
            raise ConfigError(
                f"{holders} data-parallel ranks cannot share micro_batches={self.micro_batches}: each needs at least "
                f"one. Use at most {self.micro_batches} ranks, or a recipe with more micro-batches."
            )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: where it stands in the run, and the samples of each micro-batch that is not empty."""

    epoch: int
    step: int
    """Number of the step in the run, from 0; in a plan by itself, as if all epochs were as long as its own."""
    position: int
    """Step within the epoch."""
    packed: bytes
    """All its sample indices, 64 bits each, in the order of the micro-batches: what a heartbeat notes of them."""
    indices: tuple[Indices, ...]
    """Sample indices of micro-batch k, each of shape (size,); places of the epoch where ``drawn`` is set."""
    drawn: Callable[[Indices], Indices] | None = field(default=None, compare=False)
    """Gives the numbers in the data set of what stands at places of the epoch, where samples are drawn by weight or
    sorted by length."""

    def numbers(self, k: int) -> list[int]:
        """The numbers in the data set of the samples of micro-batch k; none where a short step leaves it empty."""
        if k >= self.leaves:
            return []
        found = self.indices[k] if self.drawn is None else self.drawn(self.indices[k])
        return [int(number) for number in found]

    @property
    def leaves(self) -> int:
        """Number of micro-batches that are not empty: the leaves of the step's tree."""
        return len(self.indices)

    @property
    def samples(self) -> int:
        """Number of samples of the step."""
        return sum(len(part) for part in self.indices)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """The samples of every step of every epoch.

    Args:
        samples: size of the data set.
        shape: global batch and micro-batches.
        seed: the run's seed.
        shuffle: visit the samples in a keyed order; otherwise 0, 1, 2, ...
        drop_last: leave out the last batch of an epoch if it is not full.
        smallest_micro_batch: leave out a last micro-batch with fewer samples than this; 2 where the model has
            BatchNorm, which cannot be computed from one row.
    """

    samples: int
    shape: BatchShape
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    smallest_micro_batch: int = 1

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"The data set has {self.samples} samples, too few for one step with global_batch="
                f"{self.shape.global_batch}, drop_last={str(self.drop_last).lower()}."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, the same on every world size."""
        return -(-self._used_samples // self.shape.global_batch)

    @property
    def dropped_samples(self) -> int:
        """Samples per epoch that no step reads (see ``drop_last`` and ``smallest_micro_batch``)."""
        return self.samples - self._used_samples

    @property
    def _used_samples(self) -> int:
        if self.drop_last:
            return self.samples - self.samples % self.shape.global_batch
        tail = self.samples % self.shape.micro_batch_size
        return self.samples - (tail if tail < self.smallest_micro_batch else 0)

    def step(self, epoch: int, position: int) -> StepPlan:
        """The plan of step ``position`` of ``epoch``; needs no other step to be known."""
        if not 0 <= position < self.steps_per_epoch:
            raise IndexError(f"epoch {epoch} has steps 0 to {self.steps_per_epoch - 1}, not {position}")
        return self.steps(epoch, position, position + 1)[0]

    def steps(self, epoch: int, first: int, last: int) -> list[StepPlan]:
        """The plans of steps ``first`` to ``last - 1``, which exist; many cost hardly more than one."""
        batch, size, k = self.shape.global_batch, self.shape.micro_batch_size, self.shape.micro_batches
        order = self._order(epoch, first * batch, min(last * batch, self._used_samples))
        parts = tuple([order[i : i + size] for i in range(0, len(order), size)])
        packed = order.tobytes()
        wholes = [packed[i : i + 8 * batch] for i in range(0, len(packed), 8 * batch)]
        begun = epoch * self.steps_per_epoch
        return [
            StepPlan(
                epoch=epoch,
                step=begun + first + n,
                position=first + n,
                packed=whole,
                indices=parts[n * k : (n + 1) * k],
            )
            for n, whole in enumerate(wholes)
        ]

    def _order(self, epoch: int, first: int, last: int) -> Indices:
        positions = np.arange(first, last)
        if not self.shuffle:
            return positions
        return Permutation(self.samples, permutation_key(self.seed, epoch))(positions)
