"""The two runs that are compared, and how far apart numbers may be that differ by rounding only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.verify.plain.record import Measure, RankRecord, Recording, StepRecord

Vector = NDArray[np.float64]

_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_LAST_BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Pair:
    """A run and its reference."""

    reference: Recording
    other: Recording
    given: float | None = None
    """Relative difference up to which numbers are equal but for rounding, where it is not to follow from precision."""

    @property
    def tolerance(self) -> float:
        """Relative difference up to which numbers are equal but for rounding, over a short run."""
        return _TOLERANCES.get(self.first.context["precision"], 1e-3) if self.given is None else self.given

    @property
    def noise(self) -> float:
        """Norm of a gradient, relative to that of all, below which it may be nothing but rounding."""
        return 4 * _LAST_BITS.get(self.first.context["precision"], 2.0**-23)

    @property
    def fit(self) -> float:
        """How much of a gradient a weighted sum may leave unexplained."""
        return min(10 * self.tolerance, 0.2)

    def mine(self, step: int) -> StepRecord:
        """The step of the reference, which is one process."""
        return self.reference.ranks[0].steps[step]

    @property
    def first(self) -> RankRecord:
        """The reference's only rank."""
        return self.reference.ranks[0]

    def is_close(self, a: float, b: float, scale: float = 0.0, tolerance: float | None = None) -> bool:
        """Whether two numbers differ by rounding only; not finite ones are equal if both are not.

        Args:
            a: a number.
            b: another.
            scale: size of the numbers around them, if larger.
            tolerance: another than the pair's.
        """
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.isfinite(a) == math.isfinite(b)
        return abs(a - b) <= (tolerance or self.tolerance) * max(abs(a), abs(b), scale)

    def is_same(self, a: Measure, b: Measure, scale: float = 0.0, tolerance: float | None = None) -> bool:
        """Whether two tensors differ by rounding only, in size or direction; arguments as of ``is_close``."""
        if a.digest and a.digest == b.digest:
            return True
        if not self.is_close(a.norm, b.norm, scale, tolerance):
            return False
        first, second = vector(a), vector(b)
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            return bool(np.isfinite(first).all() == np.isfinite(second).all())
        bound = (tolerance or self.tolerance) * max(a.norm, b.norm, scale)
        return float(np.linalg.norm(first - second)) <= bound


def vector(measure: Measure) -> Vector:
    """The sketch of a tensor."""
    return np.array(measure.sketch, dtype=np.float64)
