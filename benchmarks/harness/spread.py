"""Median and quartiles of repeated measurements, and of ratios taken within one alternation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A sample of at least two measurements, summed up."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, by linear interpolation."""
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def text(self, digits: int = 2) -> str:
        """Median, then quartiles, then the whole range: ``1.05 (1.02-1.08; 0.98-1.20)``."""
        low, high = self.quartiles
        numbers = [low, high, min(self.values), max(self.values)]
        a, b, c, d = (f"{number:.{digits}f}" for number in numbers)
        return f"{self.median:.{digits}f} ({a}–{b}; {c}–{d})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, each pair from one alternation."""
    return Spread(tuple(a / b for a, b in zip(ours, theirs, strict=True)))
