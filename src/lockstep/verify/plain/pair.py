"""The two runs that are compared, and how far apart numbers may be that differ by rounding only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.verify.plain.record import Measure, RankRecord, Recording, StepRecord

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A run and its reference."""

    reference: Recording
    other: Recording
    tolerance: float = 1e-3
    """Relative difference up to which numbers are equal but for rounding."""

    def mine(self, step: int) -> StepRecord:
        """The step of the reference, which is one process."""
        return self.reference.ranks[0].steps[step]

    @property
    def first(self) -> RankRecord:
        """The reference's only rank."""
        return self.reference.ranks[0]

    def is_close(self, a: float, b: float, scale: float = 0.0) -> bool:
        """Whether two numbers differ by rounding only; not finite ones are equal if both are not."""
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.isfinite(a) == math.isfinite(b)
        return abs(a - b) <= self.tolerance * max(abs(a), abs(b), scale)

    def is_same(self, a: Measure, b: Measure, scale: float = 0.0) -> bool:
        """Whether two tensors differ by rounding only, in size or direction."""
        if a.digest and a.digest == b.digest:
            return True
        if not self.is_close(a.norm, b.norm, scale):
            return False
        first, second = vector(a), vector(b)
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            return bool(np.isfinite(first).all() == np.isfinite(second).all())
        return float(np.linalg.norm(first - second)) <= self.tolerance * max(a.norm, b.norm, scale)


def vector(measure: Measure) -> Vector:
    """The sketch of a tensor."""
    return np.array(measure.sketch, dtype=np.float64)
