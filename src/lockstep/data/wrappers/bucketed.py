"""Puts sequences of similar length into one micro-batch, in an order that is a pure function of the epoch.

epoch (keyed order)   | pool 0: 5 2 9 3 8 1 | pool 1: 7 4 6 0 ...      lengths of the samples
each pool, sorted     | 1 2   3 5   8 9     |                          groups of 2: little padding
groups, keyed order   | 8 9   1 2   3 5     |                          read in this order
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lockstep.core.plan import Indices, Permutation
from lockstep.core.seeding import derive_seed
from lockstep.data.keyed import SampleKeys
from lockstep.data.reader import Collate
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError

_POOLS_KEPT = 4


class Bucketed(Wrapping):
    """Reads the samples of ``dataset`` in groups of similar length; what it gives is one micro-batch, padded.

    Every sample is read once in each epoch. Which one stands at a place of an epoch depends on the seed, the epoch, the
    place and the lengths only, so on no process and no worker, and a run can resume anywhere. A run does not shuffle
    such a set again. Tokens weigh alike where the loss gives one value per token, the pair (sum, count), or is
    ``CrossEntropyLoss`` with an ``ignore_index`` for the padding: the division by the count of all tokens of the global
    batch comes last.

    Args:
        dataset: a map-style data set of sequences.
        lengths: the length of each sample, or a function of the set that gives them.
        group: samples of one length class in a row: the size of a micro-batch for the least padding, or the global
            batch, so that all processes have equally much to do in a step.
        pool: samples that are sorted together; a multiple of ``group``, ``None`` for 64 groups. More samples save
            padding, fewer mix the lengths more.
        collate: makes a micro-batch of a list of samples; ``None`` for ``PadSequences()``.
    """

    keeps_order = True

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int] | npt.NDArray[Any] | Tensor | Callable[[Any], Any],
        group: int,
        *,
        pool: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        super().__init__(dataset)
        pool = 64 * group if pool is None else pool
        if group < 1 or pool < group or pool % group:
            raise ConfigError(
                f"Bucketed has group={group} and pool={pool}; group must be at least 1, and pool a multiple of it."
            )
        self.lengths = np.asarray(lengths(dataset) if callable(lengths) else lengths)
        if self.lengths.shape != (len(dataset),) or self.lengths.dtype.kind not in "iu":
            raise ConfigError(
                f"Bucketed got lengths of type {self.lengths.dtype} and shape {self.lengths.shape} for {len(dataset)} "
                "samples; give one integer for each."
            )
        self.group, self.pool = group, pool
        self.collate: Collate = PadSequences() if collate is None else collate
        self._kept: OrderedDict[tuple[int, int, int], Indices] = OrderedDict()

    def __repr__(self) -> str:
        return f"Bucketed: groups of {self.group} from {self.dataset!r}"

    def sample_at(self, seed: int, epoch: int, places: Indices) -> Indices:
        """The samples that stand at ``places`` of an epoch: a pure function."""
        result = np.empty(len(places), dtype=np.int64)
        for pool in np.unique(places // self.pool).tolist():
            here = places // self.pool == pool
            result[here] = self._pool(seed, epoch, pool)[places[here] - pool * self.pool]
        return result

    def get_batch(self, indices: Indices, keys: SampleKeys) -> Any:
        """The samples at places ``indices`` of the keys' epoch, collated."""
        numbers = self.sample_at(keys.seed, keys.epoch, indices)
        return self.collated(self.collate, numbers, SampleKeys(keys.seed, keys.epoch, numbers))

    def _pool(self, seed: int, epoch: int, pool: int) -> Indices:
        key = seed, epoch, pool
        if key not in self._kept:
            self._kept[key] = self._sorted(seed, epoch, pool)
            if len(self._kept) > _POOLS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _sorted(self, seed: int, epoch: int, pool: int) -> Indices:
        start, end = pool * self.pool, min((pool + 1) * self.pool, len(self))
        drawn = Permutation(len(self), derive_seed(seed, "bucketed", epoch))(np.arange(start, end))
        drawn = drawn[np.argsort(self.lengths[drawn], kind="stable")]
        whole = len(drawn) // self.group
        if not whole:
            return drawn
        groups = drawn[: whole * self.group].reshape(whole, self.group)
        mixed = groups[Permutation(whole, derive_seed(seed, "buckets", epoch, pool))(np.arange(whole))]
        return np.concatenate([mixed.ravel(), drawn[whole * self.group :]])


class PadSequences:
    """Collates pairs of sequences, each padded at the end to the longest of the micro-batch.

    A sample is ``(input, target)``: the input of shape (length, ...), the target of the same length, or a number.

    Args:
        value: fills up a shorter input.
        ignore_index: fills up a shorter target; -100 is what ``CrossEntropyLoss`` leaves out.
    """

    def __init__(self, value: float = 0, ignore_index: float = -100) -> None:
        self.value, self.ignore_index = value, ignore_index

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Any]:
        """Input of shape (n, longest, ...), and the targets."""
        inputs, targets = zip(*samples, strict=True)
        padded = pad_sequence([torch.as_tensor(each) for each in inputs], True, self.value)
        if all(isinstance(each, (int, float)) or torch.as_tensor(each).dim() == 0 for each in targets):
            return padded, default_collate(list(targets))
        return padded, pad_sequence([torch.as_tensor(each) for each in targets], True, self.ignore_index)
