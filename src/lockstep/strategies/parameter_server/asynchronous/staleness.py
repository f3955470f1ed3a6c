"""How stale the gradients are that were used: updates made between the values they were computed on and their use."""

from __future__ import annotations

from collections.abc import Iterable


class Staleness:
    """Counts missed updates, of a whole run and since it was last asked."""

    def __init__(self) -> None:
        self._count = self._total = self._recent_count = self._recent_total = 0
        self.most = self._recent_most = self.lead = 0
        """``most``: updates that any gradient missed; ``lead``: steps that a worker was ahead of the slowest."""

    def add(self, missed: Iterable[int]) -> None:
        """Takes the updates that each gradient of an update has missed."""
        for number in missed:
            self._count, self._recent_count = self._count + 1, self._recent_count + 1
            self._total, self._recent_total = self._total + number, self._recent_total + number
            self.most, self._recent_most = max(self.most, number), max(self._recent_most, number)

    def add_lead(self, steps: int) -> None:
        """Takes how far a worker is ahead of the slowest, after a push."""
        self.lead = max(self.lead, steps)

    @property
    def mean(self) -> float:
        """Missed updates of a gradient, over the whole run."""
        return self._total / self._count if self._count else 0.0

    def recent(self) -> dict[str, float]:
        """Mean and maximum since the last call, ready for a logger; empty if no gradient came."""
        if not self._recent_count:
            return {}
        found = {
            "staleness": self._recent_total / self._recent_count,
            "staleness_max": float(self._recent_most),
        }
        self._recent_count = self._recent_total = self._recent_most = 0
        return found
