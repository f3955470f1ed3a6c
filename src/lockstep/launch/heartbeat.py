"""What a rank is doing right now, in a mapped file that costs under a microsecond to write.

One file per rank lies in the run directory (``lockstep.launch.beat``). A rank writes, the supervisor reads; no
thread, no socket and no lock is involved, so a blocked rank blocks nobody and its last words stay.

In a loop of small operations little of this code is still in the processor's caches when it is called, so its length
counts. So in most of the steps that take little time each phase is told by storing one number, the place:

    step          64 marked | 65 | 66 | ... | 80 | 81 marked | 82 | ...
    written       all       | samples, and places | all       | samples, and places
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from lockstep.launch.beat import (
    INDICES,
    MEMBERSHIP,
    MOST_SAMPLES,
    PHASES,
    PLACE,
    SAMPLES,
    SAMPLES_OF,
    SIZE,
    STEP,
    WARM,
    Membership,
    heartbeat_file,
    write_beat,
)
from lockstep.launch.control import Control, StopReason
from lockstep.launch.mapped_file import map_file
from lockstep.launch.work_meter import WorkMeter
from lockstep.world import World

if TYPE_CHECKING:
    from lockstep.permutation import Indices

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_MOST_BYTES = 8 * MOST_SAMPLES
_SHORT = 0.05
"""Seconds of a step below which it is short."""
_UNTIMED, _MOST_UNTIMED = 0.1, 31
"""Seconds and number of short steps, at most, before the next one that is marked."""


class Heartbeat:
    """Writes this rank's state and reads the stop flag.

    Where Lockstep's launcher did not start the process nothing is written, and the stop flag is the process's
    own.
    """

    def __init__(self, beat: mmap.mmap | None = None, control: Control | None = None) -> None:
        self._beat = beat
        self.control = Control() if control is None else control
        self._pid = os.getpid()
        self._step = -1
        self._length = self._size = -1
        self._meter = WorkMeter()
        self.place = memoryview(bytearray(SIZE) if beat is None else beat).cast("q")[PLACE : PLACE + 1]
        """Where to store the place in a short step: ``lockstep.launch.beat.PLACE``."""
        self.marked_from = 0
        """The first step of which all phases are to be marked again; those before are short."""

    @classmethod
    def open(cls, world: World) -> Heartbeat:
        """Opens the files of this rank in the run directory, if there is one."""
        if not world.run_directory:
            return cls()
        directory = Path(world.run_directory)
        return cls(map_file(heartbeat_file(directory, world.rank), SIZE), Control(directory))

    def mark(self, phase: str, *, epoch: int = -1, step: int = -1, micro_batch: int = -1) -> None:
        """Notes what the rank is about to do; ``phase`` is one of ``PHASES``."""
        beat = self._beat
        if beat is None:
            return
        number, now, meter = _PHASE_NUMBERS[phase], monotonic(), self._meter
        work = meter.enter(phase, step, now)
        write_beat(beat, 0, self._pid, number, micro_batch, now, epoch, step, work, meter.waited, 0)
        if step > self._step:
            beat[WARM] = self._step >= 0
            self._step = step
            if 0 < meter.latest < _SHORT and meter.has_counted(step - 1) and "mark" not in vars(self):
                self.marked_from = step + min(_MOST_UNTIMED, int(_UNTIMED / meter.latest))

    def samples(self, indices: Indices) -> None:
        """Notes the sample indices of the current micro-batch, for error reports; the first 4,086 are kept."""
        if self._beat is not None:
            self._write_samples(indices.tobytes(), 0)

    def begin_step(self, step: int, samples: bytes, size: int, micro_batches: int) -> int:
        """Notes the samples of a step, if it is short.

        Args:
            step: its number.
            samples: of all its micro-batches, 64 bits each.
            size: how many a micro-batch has; the last may have fewer.
            micro_batches: how many are this rank's.

        Returns:
            ``step * STEP``, to which phase and micro-batch are added for ``place``; 0 where ``mark`` and ``samples``
            are to be called for each phase.
        """
        if step >= self.marked_from:
            self._meter.micro_batches += micro_batches
            return 0
        self._meter.is_timed = False
        if self._beat is not None:
            self._write_samples(samples, size)
        return step * STEP

    def _write_samples(self, samples: bytes, size: int) -> None:
        assert self._beat is not None
        length = len(samples)
        if length != self._length or size != self._size:
            SAMPLES_OF.pack_into(self._beat, SAMPLES, length // 8, size)
            self._length, self._size = length, size
        if length > _MOST_BYTES:
            samples, length = samples[:_MOST_BYTES], _MOST_BYTES
        self._beat[INDICES : INDICES + length] = samples

    def will_poll(self) -> None:
        """Tells the supervisor that this rank asks ``stop_requested``, so that it is worth waiting for."""
        self.control.polled = True

    @property
    def stop_requested(self) -> bool:
        """Whether the ranks should save and stop at the next step boundary.

        Ranks see it at different times: agree on it before acting.
        """
        return self.control.reason is not StopReason.NONE

    @property
    def stop_reason(self) -> StopReason:
        """Why the ranks should stop, if they should."""
        return self.control.reason

    def mark_joined(self) -> None:
        """Notes that the rank is in the process group and owes the others its company."""
        self._set_membership(Membership.JOINED)

    def mark_leaving(self) -> None:
        """Notes that the rank waits for the others to leave the process group with it."""
        self._set_membership(Membership.LEAVING)

    def mark_finished(self) -> None:
        """Notes that the rank left the process group in agreement with the others."""
        self._set_membership(Membership.FINISHED)

    def mark_spare(self) -> None:
        """Notes that the others go on without this rank if it is killed."""
        self._set_membership(Membership.SPARE)

    def _set_membership(self, membership: Membership) -> None:
        if self._beat is not None:
            self._beat[MEMBERSHIP] = int(membership)
