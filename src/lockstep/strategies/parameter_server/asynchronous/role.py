"""What a process does in an asynchronous run: compute as a worker, or hold values as a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting


class Role(ABC):
    """One process's part, connected with the others."""

    @abstractmethod
    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """A worker's own part of a step, or the pushes of an update; see ``Strategy.backward``."""

    @abstractmethod
    def after_step(self) -> None:
        """A worker pushes and pulls; a server gives its new values."""

    @abstractmethod
    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """See ``Service.meet``."""

    @abstractmethod
    def fetch(self) -> None:
        """Sets the model to the values of all servers."""

    @abstractmethod
    def tally(self, row: Tensor) -> Tensor:
        """See ``Strategy.tally``."""

    @abstractmethod
    def farewell(self) -> None:
        """Parts from all others; servers wait for all workers."""

    def gradients(self) -> Iterable[Tensor]:
        """What this process clips."""
        return ()

    def squares(self) -> Tensor | None:
        """Squares of what this process clips, by parameter; None for nothing."""
        return None

    def readings(self) -> dict[str, float]:
        """See ``Strategy.readings``."""
        return {}

    def remarks(self) -> dict[str, str]:
        """See ``Strategy.remarks``."""
        return {}

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes of gradients, or of values, that this process has sent."""
