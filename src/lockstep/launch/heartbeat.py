"""What a rank is doing right now, in a mapped file that costs under a microsecond to write.

One file per rank lies in the run directory, and one ``control`` file for all. A rank writes, the supervisor
reads; no thread, no socket and no lock is involved, so a blocked rank blocks nobody and its last words stay.

    heartbeat-003:  pid, phase, micro-batch, time, epoch, step, work, waited, pass, membership, warm | samples
    control:        stop reason, whether any rank polls it, whether the supervisor is ending the run

In a loop of small operations little of this code is still in the processor's caches when it is called, so its length
counts. Where micro-batches are short, their samples are written once a step and each pass over one is a single number.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from lockstep.launch.work_meter import WorkMeter
from lockstep.world import World

if TYPE_CHECKING:  # the supervisor reads heartbeats without NumPy
    from collections.abc import Sequence

    from lockstep.data.batch import MicroBatch
    from lockstep.permutation import Indices

PHASES = (
    *("start", "prepare", "data", "forward", "backward", "reduce", "update"),
    *("evaluate", "save", "load", "wait", "end"),
)
"""What a rank can be doing, as shown in reports."""

FORWARD, BACKWARD = 1, 2
"""Added to twice a micro-batch's number: which pass over it begins; see ``Heartbeat.passes``."""

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_BEAT = struct.Struct("=iiqdqqddq")
"""Process, phase, micro-batch, monotonic time, epoch, step, seconds of work and of waiting, pass."""
_write_beat = _BEAT.pack_into
_PASS = 7  # in numbers of 64 bits: 0, or which pass over which micro-batch has begun since the last mark
_SHORT = 0.02
"""Seconds of work for a micro-batch below which its passes are told by ``Heartbeat.passes``."""
_SAMPLES_OF = struct.Struct("=iiii")
"""How many; and if of several micro-batches: how many of each, the first one, and how far it is to the next."""
_MEMBERSHIP = 64
_WARM = 65
_SAMPLES, _INDICES = 72, 88
_SIZE = 4096
_MOST_SAMPLES = (_SIZE - _INDICES) // 8
_REASON, _POLLED, _ENDING = 0, 1, 2  # bytes of the control file


class StopReason(IntEnum):
    """Why the ranks are asked to stop."""

    NONE = 0
    INTERRUPTED = 130
    """Ctrl-C: stop at the next step boundary; the exit code of a rank that did."""
    PREEMPTED = 75
    """The host is wanted back: save, stop, run again later; the exit code of a rank that did."""


_REASONS = {int(reason): reason for reason in StopReason}


class Stopped(SystemExit):
    """Raised by a rank that stopped because it was asked to; the reason is the exit code."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(int(reason))
        self.reason = reason


class Membership(IntEnum):
    """How far a rank has come with the process group."""

    OUTSIDE = 0
    JOINED = 1
    LEAVING = 2
    FINISHED = 3
    SPARE = 4
    """It left in agreement and goes on by itself: if it is killed, the others go on without it."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last heartbeat of one rank; -1 stands for "not in an epoch, step or micro-batch"."""

    phase: str
    epoch: int
    step: int
    micro_batch: int
    time: float
    """``time.monotonic()`` of the write."""
    pid: int
    membership: Membership
    samples: tuple[int, ...]
    warm: bool = True
    """Whether the process has done a whole step, so that nothing is compiled or allocated for the first time."""
    work: float = 0.0
    """See ``WorkMeter.seconds``."""
    waited: float = 0.0
    """See ``WorkMeter.waited``."""

    @property
    def place(self) -> str:
        """Where the rank was, as in ``step 812, forward``."""
        return f"step {self.step}, {self.phase}" if self.step >= 0 else self.phase


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
        self._passes = memoryview(bytearray(_SIZE) if beat is None else beat).cast("q")[_PASS : _PASS + 1]

    @classmethod
    def open(cls, world: World) -> Heartbeat:
        """Opens the files of this rank in the run directory, if there is one."""
        if not world.run_directory:
            return cls()
        directory = Path(world.run_directory)
        return cls(_map(heartbeat_file(directory, world.rank)), Control(directory))

    def mark(self, phase: str, *, epoch: int = -1, step: int = -1, micro_batch: int = -1) -> None:
        """Notes what the rank is about to do; ``phase`` is one of ``PHASES``."""
        beat = self._beat
        if beat is None:
            return
        number, now, meter = _PHASE_NUMBERS[phase], monotonic(), self._meter
        work = meter.enter(phase, step, now)
        _write_beat(beat, 0, self._pid, number, micro_batch, now, epoch, step, work, meter.waited, 0)
        if step > self._step:
            beat[_WARM] = self._step >= 0
            self._step = step

    def samples(self, indices: Indices) -> None:
        """Notes the sample indices of the current micro-batch, for error reports; the first 501 are kept."""
        if self._beat is not None:
            self._write_samples(indices[:_MOST_SAMPLES].tobytes(), 0, 0, 0)

    def passes(self, step: int, micro_batches: Sequence[MicroBatch]) -> memoryview | None:
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
            most = _MOST_SAMPLES // len(micro_batches)
            contents = [each.indices[:most].tobytes() for each in micro_batches]
            if len({len(each) for each in contents[:-1]}) > 1:  # some left out
                return None
            first, second = micro_batches[0].k, micro_batches[1 % len(contents)].k
            self._write_samples(b"".join(contents), len(contents[0]) // 8, first, second - first)
        return self._passes

    def _write_samples(self, content: bytes, *layout: int) -> None:
        assert self._beat is not None
        noted = _SAMPLES_OF.pack(len(content) // 8, *layout) + content
        self._beat[_SAMPLES : _SAMPLES + len(noted)] = noted

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
            self._beat[_MEMBERSHIP] = int(membership)


class Control:
    """The flags that the supervisor and all ranks of a run share.

    Args:
        directory: the run directory; without one the flags belong to this process alone.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._map = mmap.mmap(-1, _SIZE) if directory is None else _map(control_file(directory))

    @property
    def reason(self) -> StopReason:
        """Why the ranks are asked to stop, whoever asked."""
        return _REASONS[self._map[_REASON]]

    def request_stop(self, reason: StopReason) -> None:
        """Asks every rank to stop; an interrupt overrides a preemption, otherwise the first reason stands."""
        if self.reason is not StopReason.INTERRUPTED:
            self._map[_REASON] = int(reason)

    @property
    def polled(self) -> bool:
        """Whether any rank asks for the stop flag."""
        return bool(self._map[_POLLED])

    @polled.setter
    def polled(self, polled: bool) -> None:
        self._map[_POLLED] = polled

    @property
    def ending(self) -> bool:
        """Whether the supervisor ends the run: SIGTERM then means "leave now", not "save and stop"."""
        return bool(self._map[_ENDING])

    @ending.setter
    def ending(self, ending: bool) -> None:
        self._map[_ENDING] = ending

    def close(self) -> None:
        """Unmaps the file."""
        self._map.close()


def heartbeat_file(directory: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return directory / f"heartbeat-{rank:03}"


def control_file(directory: Path) -> Path:
    """The control file of a run."""
    return directory / "control"


def read_beat(directory: Path, rank: int) -> Beat | None:
    """The last heartbeat of a rank; None before its first."""
    try:
        content = heartbeat_file(directory, rank).read_bytes()
    except OSError:
        return None
    if len(content) < _SIZE:  # being made
        return None
    pid, phase, micro_batch, moment, epoch, step, work, waited, begun = _BEAT.unpack_from(content)
    if pid == 0 or not 0 <= phase < len(PHASES):
        return None
    name = PHASES[phase]
    if begun:
        name, micro_batch = "forward" if begun & 1 else "backward", (begun - 1) // 2
    return Beat(
        phase=name,
        epoch=epoch,
        step=step,
        micro_batch=micro_batch,
        time=moment,
        pid=pid,
        membership=Membership(content[_MEMBERSHIP]),
        warm=bool(content[_WARM]),
        work=work,
        waited=waited,
        samples=_samples(content, micro_batch if begun else None),
    )


def _samples(content: bytes, micro_batch: int | None) -> tuple[int, ...]:
    """The samples that a heartbeat's file holds, or those of one of its micro-batches."""
    count, size, first, stride = _SAMPLES_OF.unpack_from(content, _SAMPLES)
    samples = struct.unpack_from(f"={min(max(0, count), _MOST_SAMPLES)}q", content, _INDICES)
    if micro_batch is None or size <= 0:
        return samples
    place = (micro_batch - first) // (stride or 1)
    return samples[max(0, place) * size :][:size]


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size < _SIZE:
            os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)
