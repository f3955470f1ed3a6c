"""What a rank last said of itself, as the page of its file holds it:

heartbeat-003:  pid, phase, micro-batch, time, epoch, step, work, waited, pass, membership, warm | samples
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from lockstep.launch.page import SIZE

PHASES = (
    *("start", "prepare", "data", "forward", "backward", "reduce", "update"),
    *("evaluate", "save", "load", "wait", "end"),
)
"""What a rank can be doing, as shown in reports."""

FORWARD, BACKWARD = 1, 2
"""Added to twice a micro-batch's number: which pass over it begins; see ``Heartbeat.passes``."""

BEAT = struct.Struct("=iiqdqqddq")
"""Process, phase, micro-batch, monotonic time, epoch, step, seconds of work and of waiting, pass."""
PASS = 7  # in numbers of 64 bits: 0, or which pass over which micro-batch has begun since the last mark
SAMPLES_OF = struct.Struct("=iiii")
"""How many; and if of several micro-batches: how many of each, the first one, and how far it is to the next."""
MEMBERSHIP = 64
WARM = 65
SAMPLES, INDICES = 72, 88
MOST_SAMPLES = (SIZE - INDICES) // 8


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
    pid, phase, micro_batch, moment, epoch, step, work, waited, begun = BEAT.unpack_from(content)
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
        membership=Membership(content[MEMBERSHIP]),
        warm=bool(content[WARM]),
        work=work,
        waited=waited,
        samples=_samples(content, micro_batch if begun else None),
    )


def _samples(content: bytes, micro_batch: int | None) -> tuple[int, ...]:
    """The samples that a heartbeat's file holds, or those of one of its micro-batches."""
    count, size, first, stride = SAMPLES_OF.unpack_from(content, SAMPLES)
    samples = struct.unpack_from(f"={min(max(0, count), MOST_SAMPLES)}q", content, INDICES)
    if micro_batch is None or size <= 0:
        return samples
    place = (micro_batch - first) // (stride or 1)
    return samples[max(0, place) * size :][:size]
