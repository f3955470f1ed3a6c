"""What a logger is: a place that takes readings, and never holds up the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Logger(Protocol):
    """Takes readings of a run. ``step`` is the number of optimizer steps done so far, counted over epochs.

    Readings are plain floats: whoever calls ``log`` decides how often a value is read back from the device.
    """

    def begin(self, epoch: int, *, epochs: int, start: int, steps: int) -> None:
        """An epoch begins or goes on.

        Args:
            epoch: counted from 0.
            epochs: of the whole run.
            start: steps done before this epoch.
            steps: steps of this epoch.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Readings after ``step`` steps, such as ``loss``, ``accuracy``, ``samples_per_second``."""

    def epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """The results of a finished epoch."""

    def close(self) -> None:
        """Nothing more will come. Calling it twice does no harm."""


class NullLogger:
    """Takes readings and forgets them: the logger of every process but the main one."""

    def begin(self, epoch: int, *, epochs: int, start: int, steps: int) -> None:
        """Does nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
