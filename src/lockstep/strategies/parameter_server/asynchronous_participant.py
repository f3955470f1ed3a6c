"""The interface of one process in an asynchronous run, and the barriers and the stop that all processes share.

Barriers are numbered, and a tracker keeps the number that each process has reached:

    barriers passed here   3      entered here   4      worker 1 reached 4: it waits, or has already passed it
                                                        worker 2 reached 3: it has steps to do before it arrives

A server learns that a barrier is over after some workers do. A worker that has reached the barrier which the server has
entered may therefore push again before the server collects again; a worker that has not still needs answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.strategies.strategy import Compute, StepResult


@dataclass(frozen=True)
class Barrier:
    """The result of a barrier of all living processes."""

    values: list[Any]
    """The value of each rank; None for a rank that has ended."""
    living: list[int]
    """Ranks of the living workers."""
    bodies: dict[int, bytes | bytearray | memoryview] = field(default_factory=dict)
    """Bodies that ranks sent; on the first server only."""


def require_same(rank: int, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where ``label`` or ``number`` of a rank's barrier are not those of this rank's."""
    if (theirs.get("label"), theirs.get("number")) != (mine["label"], mine["number"]):
        raise ConfigError(
            f"Rank {rank} is at barrier {theirs.get('number')} ({theirs.get('label')}) while this rank is at barrier "
            f"{mine['number']} ({mine['label']}). Every rank must make the same calls in the same order."
        )


class BarrierTracker:
    """The last barrier that each process has reached, and those that this server has entered and passed."""

    def __init__(self) -> None:
        self._reached: dict[int, float] = {}
        self.passed = 0
        """Barriers that this server has passed."""
        self.entered = 0
        """Barriers that this server has entered; its shutdown is the last one."""

    def begin(self) -> int:
        """Enters this server's next barrier and returns its number, from 1."""
        self.entered = self.passed + 1
        return self.entered

    def end(self) -> None:
        """Marks the barrier that was entered as passed."""
        self.passed = self.entered

    def arrive(self, rank: int, number: float) -> None:
        """Notes that a process has reached a barrier; infinity where it has finished."""
        self._reached[rank] = number

    def all_wait(self, workers: Iterable[int]) -> bool:
        """Returns whether all of these already wait at this server's next barrier, and so push nothing before it."""
        return all(self._reached.get(worker, 0) > self.passed for worker in workers)

    def is_awaited(self, worker: int) -> bool:
        """Returns whether this server is at a barrier that the worker has not reached."""
        return self._reached.get(worker, 0) < self.entered


@dataclass
class Stop:
    """The step at which all ranks stop, and the reason code; zeros until a stop is requested."""

    at: int = 0
    reason: int = 0

    def adopt(self, content: Mapping[str, Any]) -> None:
        """Takes the stop of a message, unless one is known already."""
        if not self.at:
            self.at, self.reason = int(content["stop_at"]), int(content["stop_reason"])

    def as_content(self) -> dict[str, int]:
        """Fields of a message."""
        return {"stop_at": self.at, "stop_reason": self.reason}

    def reason_after(self, steps: int) -> int:
        """The reason to stop after this many steps; 0 to continue."""
        return self.reason if self.at and steps >= self.at else 0


class Participant(ABC):
    """One process, connected with the others."""

    events: StepEvents = NO_EVENTS
    """Those of the strategy."""
    bytes_sent: int = 0
    """Bytes of gradients, or of values, that this process has sent."""

    @abstractmethod
    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """A worker's own part of a step, or the pushes of an update; see ``Strategy.backward``."""

    @abstractmethod
    def after_step(self) -> None:
        """A worker pushes and pulls; a server sends its new values."""

    @abstractmethod
    def barrier(self, label: str, value: Any, body: bytes | memoryview = b"") -> Barrier:
        """Waits for all living processes and exchanges a value of each. Collective.

        Args:
            label: names the barrier; must be the same on every rank.
            value: must survive JSON.
            body: sent to the first server only.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Sets the model to the values of all servers."""

    @abstractmethod
    def sum_counts(self, row: Tensor) -> Tensor:
        """See ``IndependentStrategy.sum_counts``."""

    @abstractmethod
    def shutdown(self) -> None:
        """Disconnects from all others; servers wait for all workers."""

    def gradients(self) -> Iterable[Tensor]:
        """The gradients that this process clips."""
        return ()

    def squares(self) -> Tensor | None:
        """The sum of squares of each of ``gradients``; None without any."""
        return None

    def metrics(self) -> dict[str, float]:
        """See ``IndependentStrategy.metrics``."""
        return {}

    def summary(self) -> dict[str, str]:
        """See ``IndependentStrategy.summary``."""
        return {}
