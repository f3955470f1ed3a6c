"""What a worker does with a request, and what it sends back."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lockstep.data.inline import Request
from lockstep.data.reader import SampleReader
from lockstep.data.rooms import Answer, Room, Rooms
from lockstep.data.together import Together
from lockstep.errors import DataError


@dataclass(frozen=True)
class Failure:
    """What a worker sends in place of samples: exceptions of any kind do not survive the way between
    processes."""

    message: str
    trace: str


class InWorker(Exception):
    """Carries the traceback of the worker, as text, into the traceback of the training process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class Reads(Dataset[Any]):
    """What workers do with a request, and what the rank does with their answers."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._rooms: Rooms | None = None
        self.room: Room | None = None
        """In a worker, while it reads: the memory that its tensors are going to be sent in."""

    def __getitem__(self, request: Request) -> Together | Answer | Failure:
        worker = get_worker_info()
        self.room = self._rooms.room(worker.id) if self._rooms is not None and worker is not None else None
        try:
            found = self._reader.read_together(request.epoch, request.indices, request.sizes)
            return found if self.room is None else self.room.answer(found)
        except DataError as error:
            return Failure(str(error), traceback.format_exc())
        finally:
            self.room = None

    def open(self, workers: int, each: int) -> None:
        """Makes rooms for workers that are about to be forked, where the process may."""
        with suppress(OSError):
            self._rooms = Rooms(workers, each) if each else None

    def opened(self, answer: Answer) -> Together:
        """An answer's micro-batches."""
        assert self._rooms is not None
        return self._rooms.open(answer)

    def close(self) -> None:
        """Lets go of the rooms. Tensors in them stay."""
        if self._rooms is not None:
            self._rooms.close()
            self._rooms = None
