"""What a rank is doing right now, in a mapped file that costs under a microsecond to write.

One file per rank lies in the run directory (``lockstep.launch.beat``). A rank writes, the supervisor reads; no
thread, no socket and no lock is involved, so a blocked rank blocks nobody and its last words stay.

In a loop of small operations little of this code is still in the processor's caches when it is called, so its length
counts. Where micro-batches are short, their samples are written once a step and each pass over one is a single number.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from lockstep.launch.beat import (
    BEAT,
    MEMBERSHIP,
    MOST_SAMPLES,
    PASS,
    PHASES,
    SAMPLES,
    SAMPLES_OF,
    WARM,
    Membership,
    heartbeat_file,
)
from lockstep.launch.control import Control, StopReason
from lockstep.launch.page import SIZE, map_page
from lockstep.launch.work_meter import WorkMeter
from lockstep.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.permutation import Indices

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_write_beat = BEAT.pack_into
_SHORT = 0.02
"""Seconds of work for a micro-batch below which its passes are told by ``Heartbeat.passes``."""


class Numbered(Protocol):
    """A micro-batch, as far as a heartbeat tells of it."""

    @property
    def k(self) -> int:
        """Its number."""

    @property
    def indices(self) -> Indices:
        """Its samples."""


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
        self._meter = WorkMeter()
        self._passes = memoryview(bytearray(SIZE) if beat is None else beat).cast("q")[PASS : PASS + 1]

    @classmethod
    def open(cls, world: World) -> Heartbeat:
        """Opens the files of this rank in the run directory, if there is one."""
        if not world.run_directory:
            return cls()
        directory = Path(world.run_directory)
        return cls(map_page(heartbeat_file(directory, world.rank)), Control(directory))

    def mark(self, phase: str, *, epoch: int = -1, step: int = -1, micro_batch: int = -1) -> None:
        """Notes what the rank is about to do; ``phase`` is one of ``PHASES``."""
        beat = self._beat
        if beat is None:
            return
        number, now, meter = _PHASE_NUMBERS[phase], monotonic(), self._meter
        work = meter.enter(phase, step, now)
        _write_beat(beat, 0, self._pid, number, micro_batch, now, epoch, step, work, meter.waited, 0)
        if step > self._step:
            beat[WARM] = self._step >= 0
            self._step = step

    def samples(self, indices: Indices) -> None:
        """Notes the sample indices of the current micro-batch, for error reports; the first 501 are kept."""
        if self._beat is not None:
            self._write_samples(indices[:MOST_SAMPLES].tobytes(), 0, 0, 0)

    def passes(self, step: int, micro_batches: Sequence[Numbered]) -> memoryview | None:
        """Where to store which pass over a micro-batch begins, if a step is too short for ``mark`` and ``samples``.

        Args:
            step: the step that has been marked last.
            micro_batches: of this rank; their samples are noted, of each an equal part of the first 501 at most.

        Returns:
            A place for one number: ``2 * k + FORWARD`` or ``2 * k + BACKWARD`` for micro-batch ``k``. It holds until
            the next ``mark``. None: call ``mark`` and ``samples`` for each pass.
        """
        meter = self._meter
        meter.micro_batches += len(micro_batches)
        if step != self._step or meter.latest > _SHORT or not meter.is_working:
            return None
        if "mark" in vars(self):  # someone listens there
            return None
        if micro_batches and self._beat is not None:
            most = MOST_SAMPLES // len(micro_batches)
            contents = [each.indices[:most].tobytes() for each in micro_batches]
            if len({len(each) for each in contents[:-1]}) > 1:  # some left out
                return None
            first, second = micro_batches[0].k, micro_batches[1 % len(contents)].k
            self._write_samples(b"".join(contents), len(contents[0]) // 8, first, second - first)
        return self._passes

    def _write_samples(self, content: bytes, *layout: int) -> None:
        assert self._beat is not None
        noted = SAMPLES_OF.pack(len(content) // 8, *layout) + content
        self._beat[SAMPLES : SAMPLES + len(noted)] = noted

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
