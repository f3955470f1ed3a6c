"""Samples drawn with replacement, the heavier ones more often; and weights that balance classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.core.plan import Indices
from lockstep.core.seeding import derive_seed
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import known_labels
from lockstep.data.naming import sample_name
from lockstep.data.reader import Collate
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError, DataError

Weights = Sequence[float] | npt.NDArray[Any] | Tensor


class Weighted(Wrapping):
    """Draws ``samples`` times in each epoch, with replacement, each sample in proportion to its weight.

        epoch   place 0  place 1  place 2 ...      u = uniform(seed, epoch, place)
                   u        u        u             the sample in whose share of [0, 1) u falls

    What place ``i`` of an epoch holds depends on the seed, the epoch and ``i`` only, so it is the same for any number
    of processes and workers and after a resume. A sample that is drawn twice is augmented in two ways. Take it for
    training; an evaluation should see each sample once.

    Args:
        dataset: a map-style data set.
        weights: one number for each sample, none negative; or ``balanced``, which draws each class as often as any
            other and needs the set's labels.
        samples: draws in an epoch; ``None`` for as many as there are samples.
        collate: makes a micro-batch of a list of samples; ``None`` for torch's ``default_collate``.

    Raises:
        ConfigError: the weights do not fit the set.
        DataError: ``balanced`` was asked for and the set does not show its labels.
    """

    def __init__(
        self,
        dataset: Any,
        weights: Weights | Literal["balanced"] = "balanced",
        samples: int | None = None,
        *,
        collate: Collate | None = None,
    ) -> None:
        super().__init__(dataset)
        self.samples = len(dataset) if samples is None else samples
        self.collate = collate
        if self.samples < 1:
            raise ConfigError(f"Weighted has samples={samples}; an epoch needs at least 1.")
        if isinstance(weights, str):
            if weights != "balanced":
                raise ConfigError(f"Weighted has weights={weights!r}; give numbers, or 'balanced'.")
            labels = _labels(dataset)
            weights = 1.0 / np.bincount(labels)[labels]
        self.bounds = _bounds(np.asarray(weights, dtype=np.float64), len(dataset))
        """The upper end of each sample's share of [0, 1)."""

    def __len__(self) -> int:
        return self.samples

    def __repr__(self) -> str:
        return f"Weighted: {self.samples} draws from {self.dataset!r}"

    def sample_at(self, seed: int, epoch: int, places: Indices) -> Indices:
        """The samples at ``places`` of an epoch: a pure function."""
        keys = SampleKeys(derive_seed(seed, "weighted"), epoch, places)
        return np.searchsorted(self.bounds, keys.uniforms(1)[:, 0], side="right").astype(np.int64)

    def get_batch(self, indices: Indices, keys: SampleKeys) -> Any:
        """The samples at places ``indices`` of the keys' epoch, collated."""
        return self.collated(self.collate, self.sample_at(keys.seed, keys.epoch, indices), keys)


def class_weights(dataset: Any, classes: int) -> Tensor:
    """Weights for ``CrossEntropyLoss(weight=...)`` under which every class counts alike; of shape (classes,), mean 1
    over the samples.

    ``DataError`` where the set does not show its labels, or a class has no sample.
    """
    labels = _labels(dataset)
    counts = np.bincount(labels, minlength=classes)
    empty = np.flatnonzero(counts[:classes] == 0)
    if len(empty) or len(counts) > classes:
        what = f"class {empty[0]} has no sample" if len(empty) else f"there is a label {len(counts) - 1}"
        raise DataError(f"Class weights were asked for {classes} classes, and {what}. Give the classes that occur.")
    return torch.from_numpy(len(labels) / (classes * counts)).to(torch.float32)


def _labels(dataset: Any) -> npt.NDArray[np.int64]:
    labels = known_labels(dataset)
    if labels is None or labels.min() < 0:
        raise DataError(
            f"Weights that balance classes need an attribute labels or targets of {type(dataset).__name__}, with one "
            "integer of 0 or more for each sample. Add it, or give the weights yourself."
        )
    return labels


def _bounds(weights: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.float64]:
    """The upper end of each sample's share of [0, 1); ``np.cumsum`` adds in order, so it is the same everywhere."""
    if weights.shape != (samples,):
        raise ConfigError(
            f"Weighted got weights of shape {weights.shape} for {samples} samples; it takes one for each."
        )
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong) or not weights.any():
        found = f"{sample_name(None, int(wrong[0]))} has {weights[wrong[0]]:g}" if len(wrong) else "all are 0"
        raise ConfigError(f"Weights must be finite, not negative and not all 0; {found}.")
    total = np.cumsum(weights)
    bounds = total / total[-1]
    bounds[np.flatnonzero(weights)[-1] :] = 1.0  # so that rounding leaves no number above the last share
    return np.asarray(bounds, dtype=np.float64)
