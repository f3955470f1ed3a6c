"""Which samples each micro-batch of each step holds: a pure function, with no state and no rank in it.

    samples of an epoch     p0 p1 p2 p3 p4 p5 p6 p7 | p8 p9 p10            in the keyed order of the epoch
    steps (global batch 8)  |------- step 0 --------| step 1 (ragged) |
    micro-batches (K = 4)   k0    k1    k2    k3      k0    k1  -  -       two of the four are empty: not run

The last batch is cut into full micro-batches first, then a short one; the rest are empty. Nothing is padded and no
sample is seen twice. A rank holds a run of consecutive micro-batches; K, not the number of ranks, decides the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.errors import ConfigError
from lockstep.permutation import Indices, Permutation
from lockstep.seeding import permutation_key


def share(items: int, holders: int, holder: int) -> range:
    """The consecutive items of one holder: floor or ceil of ``items / holders``, the larger shares first."""
    size, larger = divmod(items, holders)
    start = holder * size + min(holder, larger)
    return range(start, start + size + (holder < larger))


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which of numbered items (the micro-batches of a step, or of an evaluation) a process takes."""

    holders: int = 1
    """How many share them."""
    holder: int | None = 0
    """This process's number among them; None for one that computes nothing, such as a parameter server."""
    interleaved: bool = False
    """Take every ``holders``-th item instead of a run of consecutive ones."""
    rounds: bool = False
    """Give every holder the same number of items, for strategies whose forward pass is collective. The surplus numbers
    are spares: they are run on the samples of item 0 and count for nothing. Implies ``interleaved``."""

    def of(self, items: int, holder: int | None = None) -> range:
        """The items of a holder, by default of this process; with ``rounds``, numbers from ``items`` on are spares."""
        holder = self.holder if holder is None else holder
        if holder is None:
            return range(0)
        if self.rounds:
            return range(holder, -(-items // self.holders) * self.holders, self.holders)
        if self.interleaved:
            return range(holder, items, self.holders)
        return share(items, self.holders, holder)

    def longest(self, items: int) -> int:
        """The most items of any holder."""
        return -(-items // self.holders)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How many samples make one optimizer step, and in how many micro-batches they are computed."""

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
    """Global step, counted over epochs."""
    position: int
    """Step within the epoch."""
    packed: bytes
    """All its sample indices, 64 bits each, in the order of the micro-batches: what a heartbeat notes of them."""
    indices: tuple[Indices, ...]
    """Sample indices of micro-batch k, each of shape (size,)."""

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
