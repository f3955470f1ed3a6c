"""What a rank last said of itself, as its file holds it:

heartbeat-003:  pid, phase, micro-batch, time, epoch, step, work, waited, place, membership, warm | samples
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

PHASES = (
    *("start", "prepare", "data", "forward", "backward", "reduce", "update"),
    *("evaluate", "save", "load", "wait", "end"),
)
"""What a rank can be doing, as shown in reports."""

_BEAT = struct.Struct("=iiqdqqddq")
"""Process, phase, micro-batch, monotonic time, epoch, step, seconds of work and of waiting, place."""
write_beat = _BEAT.pack_into
PLACE = 7
"""The place is this number of 64 bits. It is 0, or where the rank has come to since, in a short step: the sum of
``place_in_step(phase)``, ``k * MICRO_BATCH`` and ``step * STEP``."""
MICRO_BATCH, STEP = 1 << 4, 1 << 24
SAMPLES_OF = struct.Struct("=ii")
"""How many samples there are, and how many of them in a micro-batch; 0: all of them."""
MEMBERSHIP = 64
WARM = 65
SAMPLES, INDICES = 72, 80
SIZE = 32768
MOST_SAMPLES = (SIZE - INDICES) // 8


def place_in_step(phase: str) -> int:
    """The number of a phase in a place, for micro-batch 0 where the phase is a pass over one."""
    return 1 + PHASES.index(phase) + (MICRO_BATCH if phase in ("forward", "backward") else 0)


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
    """``time.monotonic()`` of the write; in short steps of one not long before."""
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


def heartbeat_file(directory: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return directory / f"heartbeat-{rank:03}"


def read_beat(directory: Path, rank: int) -> Beat | None:
    """The last heartbeat of a rank; None before its first."""
    try:
        content = heartbeat_file(directory, rank).read_bytes()
    except OSError:
        return None
    if len(content) < SIZE:  # being made
        return None
    pid, phase, micro_batch, moment, epoch, step, work, waited, place = _BEAT.unpack_from(content)
    if place:
        phase, micro_batch, step = place % MICRO_BATCH - 1, place % STEP // MICRO_BATCH - 1, place // STEP
    if pid == 0 or not 0 <= phase < len(PHASES):
        return None
    name = PHASES[phase]
    return Beat(
        phase=name,
        epoch=epoch,
        step=step,
        micro_batch=micro_batch,
        time=moment,
        pid=pid,
        membership=Membership(content[MEMBERSHIP]),
        warm=bool(content[WARM]),
        work=work,
        waited=waited,
        samples=_samples(content, micro_batch) if name != "data" else (),  # those are of the step before
    )


def _samples(content: bytes, micro_batch: int) -> tuple[int, ...]:
    """Of a micro-batch, if that is known, or all that the heartbeat holds; none where they did not fit."""
    count, size = SAMPLES_OF.unpack_from(content, SAMPLES)
    samples = struct.unpack_from(f"={min(max(0, count), MOST_SAMPLES)}q", content, INDICES)
    if size <= 0 or micro_batch < 0:
        return samples
    first = micro_batch * size
    return samples[first if first < count else 0 :][:size]  # a spare has the samples of micro-batch 0
