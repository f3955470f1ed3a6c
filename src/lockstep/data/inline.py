"""Reads micro-batches in the training process, when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.data.reader import SampleReader
from lockstep.permutation import Indices


@dataclass(frozen=True)
class Request:
    """One micro-batch that is to be read."""

    epoch: int
    indices: Indices


class Reading(Protocol):
    """A way to have micro-batches read: here, or in worker processes."""

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each request, in the order of the requests."""

    def at_once(self) -> AbstractContextManager[None]:
        """What is asked for inside is one step's: a way that reads here may prepare for all of it."""

    @property
    def sound(self) -> bool:
        """Whether what was started is still there to answer."""

    def close(self) -> None:
        """Ends whatever the way has started. Reading again starts it anew."""


class InlineReading:
    """No processes and no threads: right where the samples are in memory."""

    def __init__(self, reader: SampleReader, *, pin_memory: bool = False) -> None:
        self._reader = reader
        self._pin_memory = pin_memory

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each request, in the order of the requests."""
        for request in requests:
            data = self._reader.read(request.epoch, request.indices)
            yield pinned(data) if self._pin_memory else data

    def at_once(self) -> AbstractContextManager[None]:
        """Takes the process's random state once for all that is read inside."""
        return self._reader.at_once()

    @property
    def sound(self) -> bool:
        """Always: nothing was started."""
        return True

    def close(self) -> None:
        """Does nothing: nothing was started."""


def pinned(data: Any) -> Any:
    """The same tensors in page-locked memory, in tuples, lists and dicts of any depth."""
    if isinstance(data, dict):
        return {name: pinned(value) for name, value in data.items()}
    if isinstance(data, list):
        return [pinned(value) for value in data]
    if isinstance(data, tuple):
        values = [pinned(value) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return data.pin_memory() if hasattr(data, "pin_memory") else data
