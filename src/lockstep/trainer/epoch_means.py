"""The means of an epoch's readings; a run that is resumed within the epoch goes on with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EpochMeans:
    """Sums of the readings of one epoch.

    Args:
        epoch: which one.
        stored: what ``as_dict`` gave beside the checkpoint that was taken up; that of another epoch is left out.
    """

    def __init__(self, epoch: int, stored: Mapping[str, Any] | None = None) -> None:
        known = stored if stored is not None and stored.get("epoch") == epoch else {}
        self._epoch, self._count = epoch, int(known.get("count", 0))
        self._sums: dict[str, float] = dict(known.get("sums", {}))

    def add(self, reading: Mapping[str, float]) -> None:
        """Takes a reading, which has the same names as the first."""
        self._count += 1
        for name, value in reading.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """The mean of each; empty before the first reading."""
        return {name: total / self._count for name, total in self._sums.items()}

    def as_dict(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        return {"epoch": self._epoch, "count": self._count, "sums": dict(self._sums)}
