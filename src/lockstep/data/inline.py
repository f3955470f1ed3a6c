"""Reads micro-batches in the training process, when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.data.pinning import pinned
from lockstep.data.reader import SampleReader
from lockstep.permutation import Indices


@dataclass(frozen=True)
class Request:
    """One micro-batch that is to be read, or several of a step."""

    epoch: int
    indices: Indices
    """The samples of all of them, one micro-batch after the other."""
    sizes: tuple[int, ...] = ()
    """Samples of each micro-batch; empty for a single one."""

    @property
    def micro_batches(self) -> int:
        """How many are asked for."""
        return len(self.sizes) or 1


class Reading(Protocol):
    """A way to have micro-batches read: here, or in worker processes."""

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each micro-batch, in the order of the requests."""

    @property
    def at_a_time(self) -> int:
        """How many micro-batches one request should ask for: some of a step, or those of as many steps as they fill."""

    @property
    def sound(self) -> bool:
        """Whether what was started is still there to answer."""

    def close(self) -> None:
        """Ends whatever the way has started. Reading again starts it anew."""


class InlineReading:
    """No processes and no threads: right where the samples are in memory.

    Args:
        reader: reads the micro-batches.
        per_step: how many of them a step has here.
        steps: how many steps are read together, unless somebody writes into the set meanwhile.
        pin_memory: deliver tensors in page-locked memory.
    """

    def __init__(
        self, reader: SampleReader, *, per_step: int = 1, steps: int = 1, pin_memory: bool = False
    ) -> None:
        self._reader = reader
        self._per_step, self.at_a_time = per_step, per_step * steps
        self._pin_memory = pin_memory

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each micro-batch, in the order of the requests."""
        for request in requests:
            parts = self._parts(request)
            for number in range(request.micro_batches):
                if number and number % self._per_step == 0 and not self._reader.unchanged:
                    parts = self._parts(request)
                yield parts[number]

    def _parts(self, request: Request) -> Sequence[Any]:
        found = self._reader.read_together(request.epoch, request.indices, request.sizes)
        return (found.map(pinned) if self._pin_memory else found).apart()

    @property
    def sound(self) -> bool:
        """Always: nothing was started."""
        return True

    def close(self) -> None:
        """Does nothing: nothing was started."""
