"""The heartbeat of a rank: what it is doing right now, in a memory-mapped file that takes under a microsecond to write.

The run directory has one file for each rank. The rank writes, the supervisor reads; no thread, socket or lock is
involved, so a blocked rank blocks nobody and its last heartbeat remains:

heartbeat-003:  pid, phase, micro-batch, time, epoch, step, work, waited, packed phase,
                seconds of steps, membership, warm | samples

In a loop of small operations little of this code stays in the processor's caches, so it has to be short. In most of
the short steps ``enter`` therefore stores one number, the packed phase:

    step          64 marked | 65 | 66 | ...     | 80 | 81 marked | 82 | ...
    written       all       | samples, packed phases | all       | samples, packed phases

``StepTimer`` adds up how long a rank works on its steps, and how long it waits for other ranks.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

from lockstep.core.world import World
from lockstep.runtime.control import Control, StopReason, map_file
from lockstep.runtime.events import NO_EVENTS, StepEvents

if TYPE_CHECKING:
    from lockstep.core.plan import Indices

PHASES = (
    *("start", "prepare", "data", "forward", "backward", "reduce", "update"),
    *("evaluate", "save", "load", "wait", "end", "script"),
)
"""The phases of a rank, as shown in reports; ``script`` is the user's code after an evaluation."""

_BEAT = struct.Struct("=iiqdqqddqd")
"""Process, phase, micro-batch, monotonic time, epoch, step, seconds of work and of waiting, packed phase, and seconds
of steps."""
write_beat = _BEAT.pack_into
PACKED_PHASE = 7
"""Index of the packed phase, of 64 bits. It is 0, or the current position in a short step: the sum of
``step * STEP``, ``(k + 1) * MICRO_BATCH`` and the number of the phase plus 1; ``k`` is -1 for no micro-batch."""
MICRO_BATCH, STEP = 1 << 4, 1 << 24
SAMPLES_OF = struct.Struct("=ii")
"""Number of samples, and of those in a micro-batch; 0: all of them."""
MEMBERSHIP = 72
WARM = 73
SAMPLES, INDICES = 80, 88
SIZE = 32768
MOST_SAMPLES = (SIZE - INDICES) // 8


DATA, FORWARD, BACKWARD, REDUCE, UPDATE = (
    PHASES.index(phase) for phase in ("data", "forward", "backward", "reduce", "update")
)
"""Numbers of the phases of a step."""


class Membership(IntEnum):
    """The relation of a rank to the process group."""

    OUTSIDE = 0
    JOINED = 1
    LEAVING = 2
    """It waits for the others to leave together."""
    FINISHED = 3
    """It has left together with the others."""
    INDEPENDENT = 4
    """It has left together with the others and runs by itself: if it is killed, the others continue without it."""


_MEMBERSHIPS = {int(membership): membership for membership in Membership}


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last heartbeat of one rank; -1 stands for "not in an epoch, step or micro-batch"."""

    phase: str
    epoch: int
    step: int
    micro_batch: int
    time: float
    """``time.monotonic()`` of the write; in short steps that of an earlier write."""
    pid: int
    membership: Membership
    samples: tuple[int, ...]
    warm: bool = True
    """True if the process has completed a step, so that nothing is compiled or allocated for the first time."""
    work: float = 0.0
    """See ``StepTimer.seconds``."""
    waited: float = 0.0
    """See ``StepTimer.waited``."""
    stepped: float = 0.0
    """See ``StepTimer.stepped``."""

    @property
    def position(self) -> str:
        """The position of the rank, as in ``step 812, forward``."""
        return f"step {self.step}, {self.phase}" if self.step >= 0 else self.phase


def heartbeat_file(directory: Path, rank: int) -> Path:
    """Returns the heartbeat file of a rank."""
    return directory / f"heartbeat-{rank:03}"


def read_beats(directory: Path, ranks: Iterable[int]) -> dict[int, Beat]:
    """Returns the last heartbeat of each of these ranks that has written one."""
    return {rank: beat for rank in ranks if (beat := read_beat(directory, rank)) is not None}


def read_beat(directory: Path, rank: int) -> Beat | None:
    """Reads the last heartbeat of a rank; None before its first."""
    try:
        content = heartbeat_file(directory, rank).read_bytes()
    except OSError:
        return None
    return _parsed(content) if len(content) >= SIZE else None  # being made


def _parsed(content: bytes) -> Beat | None:
    pid, phase, micro_batch, moment, epoch, step, work, waited, packed_phase, stepped = _BEAT.unpack_from(content)
    if packed_phase:
        step, rest = divmod(packed_phase, STEP)
        micro_batch, phase = rest // MICRO_BATCH - 1, rest % MICRO_BATCH - 1
    if pid == 0 or not 0 <= phase < len(PHASES) or content[MEMBERSHIP] not in _MEMBERSHIPS:
        return None
    name = PHASES[phase]
    return Beat(
        phase=name,
        epoch=epoch,
        step=step,
        micro_batch=micro_batch,
        time=moment,
        pid=pid,
        membership=_MEMBERSHIPS[content[MEMBERSHIP]],
        warm=bool(content[WARM]),
        work=work,
        waited=waited,
        stepped=stepped,
        samples=_samples(content, micro_batch) if name != "data" else (),  # those are of the step before
    )


def _samples(content: bytes, micro_batch: int) -> tuple[int, ...]:
    """Returns the samples of a micro-batch if it is known, else all; none if they did not fit."""
    count, size = SAMPLES_OF.unpack_from(content, SAMPLES)
    samples = struct.unpack_from(f"={min(max(0, count), MOST_SAMPLES)}q", content, INDICES)
    if size <= 0 or micro_batch < 0:
        return samples
    first = micro_batch * size
    return samples[first if first < count else 0 :][:size]  # padding has the samples of micro-batch 0


_WORK = frozenset({"data", "forward", "backward", "update"})
_WAIT = frozenset({"reduce", "wait"})


class StepTimer:
    """Measures the seconds of work of a rank on one micro-batch, added up over all steps so far.

    Work is divided by the number of micro-batches, which may differ by one among ranks that are equally fast. A rank
    without any, such as a parameter server, does other work, which is compared with nobody's and counts as none. A step
    that is not timed counts as much as the timed step before or after it, whichever took less, so a pause in a timed
    step counts once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds of exchange that do not overlap with work, over all steps so far."""
        self.stepped = 0.0
        """Seconds of work on all micro-batches and of exchange: of the steps, without what lies between them."""
        self.latest = math.inf
        """Duration of the last timed step in seconds."""
        self.micro_batches = 0
        """Of the step so far; added by the caller that begins them."""
        self.is_timed = False
        """True if all phases of the step so far were entered; cleared by a caller that leaves some out."""
        self.counted = -1
        """The last timed step."""
        self._step, self._began = -1, 0.0
        self._timed = math.inf, math.inf, math.inf
        self._phase, self._since = "", 0.0
        self._worked = self._idle = 0.0

    def enter(self, phase: str, step: int, now: float) -> float:
        """Enters a phase of a step (-1: outside of any) at the time ``now``; returns ``seconds``."""
        if self._phase in _WORK:
            self._worked += now - self._since
        elif self._phase in _WAIT:
            self._idle += now - self._since
        if step > self._step:
            self._begin(phase, step, now)
        self._phase, self._since = phase, now
        return self.seconds

    def _begin(self, phase: str, step: int, now: float) -> None:
        if self.is_timed:
            untimed = self._step - self.counted - 1
            work, idle = self._worked / self.micro_batches if self.micro_batches else 0.0, self._idle
            whole = self._worked + idle
            self.seconds += work + untimed * min(work, self._timed[0])
            self.waited += idle + untimed * min(idle, self._timed[1])
            self.stepped += whole + untimed * min(whole, self._timed[2])
            self._timed, self.latest, self.counted = (work, idle, whole), now - self._began, self._step
        elif self._step < 0:
            self.counted = step - 1
        self.is_timed = phase in _WORK
        self._step, self._began, self._worked, self._idle, self.micro_batches = step, now, 0.0, 0.0, 0


_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_MOST_BYTES = 8 * MOST_SAMPLES
_SHORT = 0.05
"""A step that takes fewer seconds is short."""
_UNTIMED, _MOST_UNTIMED = 0.1, 31
"""Maximum seconds and number of short steps before the next one that is marked."""


_TIME = struct.calcsize("=iiq")
_opened: list[mmap.mmap] = []
"""The file of this process's rank, once it is open."""


def heartbeat() -> None:
    """Tells the supervisor that this rank is alive, in a long phase of the program's own, such as an export.

    Call it at least every ``--stall-limit`` seconds (60), between the calls of Lockstep; the run is then not ended for
    standing still while other ranks wait for this one. It takes a microsecond, any rank may call it, and where
    Lockstep's supervisor has not started the process it does nothing.
    """
    for beat in _opened[-1:]:
        struct.pack_into("=d", beat, _TIME, monotonic())


class Heartbeat:
    """Writes this rank's state and reads the stop flag.

    If another launcher started the process, nothing is written and the stop flag is the process's own. Callbacks of
    ``events`` receive every phase and its samples; while there are any, no step is short.
    """

    training_thread = 0
    """The thread of this process that opened the run, or reads its batches."""

    def __init__(
        self, beat: mmap.mmap | None = None, control: Control | None = None, events: StepEvents = NO_EVENTS
    ) -> None:
        self._beat, self._events = beat, events
        self.control = Control() if control is None else control
        self.own_reason = StopReason.NONE
        """Why this process asks its run to stop, where its supervisor is not to know."""
        self._pid = os.getpid()
        self._step = -1
        self._length = self._size = -1
        self._meter = StepTimer()
        self._packed = memoryview(bytearray(SIZE) if beat is None else beat).cast("q")[PACKED_PHASE : PACKED_PHASE + 1]
        self._base = 0
        self._epoch = self._entered = -1
        self.note_thread()
        self.marked_from = 0
        """The next step whose phases are all marked; those before it are short."""

    @classmethod
    def open(cls, world: World, events: StepEvents = NO_EVENTS) -> Heartbeat:
        """Opens the files of this rank in the run directory, if there is one."""
        if not world.run_directory:
            return cls(events=events)
        directory = Path(world.run_directory)
        _opened[:] = [map_file(heartbeat_file(directory, world.rank), SIZE)]
        return cls(_opened[0], Control(directory), events)

    def note_thread(self) -> None:
        """Notes that this thread trains: an error that ends it counts as that of the rank."""
        Heartbeat.training_thread = get_ident()

    def mark(self, phase: str, *, epoch: int = -1, step: int = -1, micro_batch: int = -1) -> None:
        """Writes what the rank is about to do; ``phase`` is one of ``PHASES``."""
        beat = self._beat
        if beat is not None:
            number, now, meter = _PHASE_NUMBERS[phase], monotonic(), self._meter
            work = meter.enter(phase, step, now)
            write_beat(beat, 0, self._pid, number, micro_batch, now, epoch, step, work, meter.waited, 0, meter.stepped)
            if step > self._step:
                beat[WARM] = self._step >= 0
                self._step = step
                if 0 < meter.latest < _SHORT and meter.counted == step - 1:
                    self.marked_from = step + min(_MOST_UNTIMED, int(_UNTIMED / meter.latest))
        for call in self._events.phase:
            call(phase, epoch, step, micro_batch)

    def samples(self, indices: Indices) -> None:
        """Writes the sample indices of the current micro-batch, for error reports; the first 4,085 are kept."""
        if self._beat is not None:
            self._write_samples(indices.tobytes(), 0)
        for call in self._events.samples:
            call(indices)

    def begin_step(self, epoch: int, step: int, samples: bytes, size: int, micro_batches: int) -> None:
        """Sets the step of the next calls of ``enter``, and writes its samples if it is short.

        They are those of all this rank's micro-batches, 64 bits each; ``size`` is that of a micro-batch, of which the
        last may have fewer.
        """
        if not self._is_short(step):
            self._epoch, self._entered, self._base = epoch, step, 0
            self._meter.micro_batches += micro_batches
            return
        self._base = step * STEP + MICRO_BATCH + 1
        self._meter.is_timed = False
        if self._beat is not None:
            self._write_samples(samples, size)

    def enter(self, phase: int, k: int = -1, indices: Indices | None = None) -> None:
        """Writes what the rank is about to do within the current step: ``FORWARD`` or another number of a phase.

        ``k`` is the number of the micro-batch, if there is one; ``indices`` are its samples, if they are to be written.
        """
        if self._base:
            self._packed[0] = self._base + k * MICRO_BATCH + phase
            return
        self.mark(PHASES[phase], epoch=self._epoch, step=self._entered, micro_batch=k)
        if indices is not None:
            self.samples(indices)

    def leave_untimed(self) -> None:
        """Leaves the step out of the time of work: it is rehearsed, and ranks wait for each other in any phase."""
        self._meter.is_timed = False

    def await_data(self, epoch: int, step: int) -> None:
        """Writes that the rank waits for the data of a step, which has not begun."""
        if self._is_short(step):
            self._packed[0] = step * STEP + DATA + 1
        else:
            self.mark("data", epoch=epoch, step=step)

    def _is_short(self, step: int) -> bool:
        return step < self.marked_from and not self._events.phase

    def _write_samples(self, samples: bytes, size: int) -> None:
        assert self._beat is not None
        length = len(samples)
        if length != self._length or size != self._size:
            SAMPLES_OF.pack_into(self._beat, SAMPLES, length // 8, size)
            self._length, self._size = length, size
        if length > _MOST_BYTES:
            samples, length = samples[:_MOST_BYTES], _MOST_BYTES
        self._beat[INDICES : INDICES + length] = samples

    @property
    def last(self) -> Beat | None:
        """The last heartbeat as the supervisor reads it; needs no descriptor."""
        return None if self._beat is None else _parsed(self._beat[:])

    def will_poll(self) -> None:
        """Tells the supervisor that this rank polls ``stop_reason``, so that it waits for the rank to stop."""
        self.control.polled = True

    @property
    def stop_reason(self) -> StopReason:
        """Why the ranks should save and stop at the next step boundary, if they should.

        Ranks see it at different times: agree on it before acting.
        """
        return max(self.control.reason, self.own_reason)

    def set_membership(self, membership: Membership) -> None:
        """Writes the rank's relation to the process group."""
        if self._beat is not None:
            self._beat[MEMBERSHIP] = int(membership)
