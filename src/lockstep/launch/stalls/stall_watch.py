"""Notices that ranks are silent, takes a snapshot of every rank, and reports a stall.

A rank that writes heartbeats is examined only when it has been silent for longer than its own steps suggest
(``SilenceLimit``). A script that writes none is examined every now and then: it is stalled if its line of code and its
collectives stay the same. No rank can block ``take_snapshots``: each answer has its own short limit.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.launch.stalls.report import StallKind, StallVerdict, judge_stall
from lockstep.launch.stalls.snapshot import Collective, RankSnapshot, Stack, main_stack
from lockstep.runtime.heartbeat import Beat, Membership, read_beats
from lockstep.runtime.stack_dump import DUMP_SIGNAL, Mark, recorder_socket, stack_file, unescaped

_LEARNED = 5.0
"""A rank may be silent for this multiple of its longest silence so far."""
_KNOWN_STEPS = 20
"""Steps after which the longest silence is known well enough."""
_SLOW = 10.0
"""Factor for phases that are slow by nature, and for the first step, which may compile."""
_SLOW_PHASES = ("start", "prepare", "load", "save", "evaluate", "script")


@dataclass
class SilenceLimit:
    """Learns from the steps of one rank for how long it may be silent."""

    floor: float
    """Seconds below which no silence is a stall; 0 means that none ever is."""
    _last: Beat | None = None
    _longest: float = 0.0
    _moved: float = 0.0
    _steps: set[int] = field(default_factory=set)

    def update(self, beat: Beat) -> None:
        """Takes the rank's newest heartbeat; may be called any number of times."""
        last = self._last
        if last is not None:
            if last.warm and last.phase not in _SLOW_PHASES:
                self._longest = max(self._longest, beat.time - last.time)
            if (last.step, last.micro_batch, last.phase) != (beat.step, beat.micro_batch, beat.phase):
                self._moved = time.monotonic()
        if beat.step >= 0 and len(self._steps) <= _KNOWN_STEPS:
            self._steps.add(beat.step)
        self._last = beat

    def silence(self, beat: Beat) -> float:
        """Returns the seconds since the rank wrote this heartbeat or moved; short steps do not write the time."""
        return time.monotonic() - max(beat.time, self._moved)

    def limit(self, beat: Beat, *, usual: bool = False) -> float:
        """Returns the seconds of silence after this heartbeat from which the rank counts as stalled.

        Args:
            usual: without the longer time that slow phases have.
        """
        if not self.floor or beat.phase == "end" or beat.membership is Membership.FINISHED:
            return math.inf
        if not usual and (beat.phase in _SLOW_PHASES or not beat.warm):
            return _SLOW * self.floor
        learned = _LEARNED * self._longest if len(self._steps) > _KNOWN_STEPS else 0.0
        return max(self.floor, learned)


_ANSWER_WITHIN = 0.5
_MOST_WORKERS = 8
_KEPT_COLLECTIVES = 32
_LARGEST_ANSWER = 32 << 20
_REQUEST = b"POST /handler/fr_trace_json HTTP/1.0\r\nContent-Length: 0\r\n\r\n"


def take_snapshots(
    directory: Path, processes: Mapping[int, int], limits: Mapping[int, SilenceLimit]
) -> list[RankSnapshot]:
    """Returns a snapshot of each rank that has written a heartbeat, by rank; ``processes`` has their process ids."""
    return [
        _ask(directory, rank, processes[rank], beat, limits.get(rank, SilenceLimit(0.0)))
        for rank, beat in read_beats(directory, sorted(processes)).items()
    ]


def _ask(directory: Path, rank: int, pid: int, beat: Beat, limit: SilenceLimit) -> RankSnapshot:
    state = process_state(pid)
    answers = state not in ("T", "t", "D", "")
    stack = _stack_of(directory, rank, pid) if answers else ()
    asked = children(pid)[:_MOST_WORKERS] if answers else []
    workers = [_stack_of(directory, rank, child) for child in asked]
    return RankSnapshot(
        rank=rank,
        pid=pid,
        state=state,
        beat=beat,
        silence=limit.silence(beat),
        limit=limit.limit(beat),
        stack=stack,
        workers=tuple(stack for stack in workers if any(frame.kind is Mark.READS_SAMPLES for frame in stack)),
        collectives=_collectives_of(directory, rank) if answers else (),
    )


def process_state(pid: int) -> str:
    """Returns the kernel's letter for the state of a process; empty if there is none, ``?`` where /proc is absent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "" if Path("/proc/self").exists() else "?"


def children(pid: int) -> list[int]:
    """Returns the process ids of the children of a process."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _stack_of(directory: Path, rank: int, pid: int) -> Stack:
    """Asks one process for its stack; empty if it does not answer in time."""
    path = stack_file(directory, rank)
    try:
        start = path.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
    except OSError:
        return ()
    deadline, size = time.monotonic() + _ANSWER_WITHIN, start
    while time.monotonic() < deadline:
        time.sleep(0.01)  # a signal handler cannot notify; it can only write
        now = path.stat().st_size
        if now == size > start:
            break
        size = now
    with path.open("rb") as file:
        file.seek(start)
        return main_stack(unescaped(file.read(1 << 20).decode(errors="replace")))


def _collectives_of(directory: Path, rank: int) -> tuple[Collective, ...]:
    """Fetches the last collectives of a rank's first process group from torch's Flight Recorder; none if not served."""
    try:
        found = json.loads(_fetch(recorder_socket(directory, rank)))
        entries = [each for each in found["entries"] if each["pg_id"] == 0 and not each["is_p2p"]]
        return tuple(_collective(each) for each in entries[-_KEPT_COLLECTIVES:])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        sequence=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]),
        sizes=tuple(tuple(int(n) for n in size) for size in entry["input_sizes"]),
        types=tuple(map(str, entry["input_dtypes"])),
        pending=not entry["retired"],
    )


def _fetch(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_WITHIN)
        connection.connect(str(path))
        connection.sendall(_REQUEST)
        answer = b""
        while (part := connection.recv(65536)) and len(answer) < _LARGEST_ANSWER:
            answer += part
    return answer.partition(b"\r\n\r\n")[2]


_LOOKS_PER_LIMIT = 4


@dataclass(frozen=True)
class Stall:
    """A stalled run."""

    verdict: StallVerdict
    snapshots: tuple[RankSnapshot, ...]


class StallWatch:
    """Watches the ranks of one host, whose heartbeats are in the run directory.

    No silence below ``limit`` seconds is a stall; 0: never look. With ranks on other hosts (``is_part``) node 0 judges.
    """

    def __init__(self, directory: Path, limit: float, *, is_part: bool = False) -> None:
        self._directory, self._limit, self._is_part = directory, limit, is_part
        self._limits: dict[int, SilenceLimit] = {}
        self._places: dict[int, tuple[object, float]] = {}
        self._next_look = 0.0
        self._reported: set[tuple[object, ...]] = set()

    def look(self, processes: Mapping[int, int]) -> Stall | None:
        """Returns the stall of the ranks with these process ids, if there is one; cheap while they write heartbeats."""
        if not self._limit:
            return None
        beats = read_beats(self._directory, processes)
        if any(beat.membership is Membership.LEAVING for beat in beats.values()):
            return None  # see ``EarlyExitDetector``
        for rank, beat in beats.items():
            self._limits.setdefault(rank, SilenceLimit(self._limit)).update(beat)
        now = time.monotonic()
        if now < self._next_look or not any(self._is_due(rank, beat) for rank, beat in beats.items()):
            return None
        self._next_look = now + self._limit / _LOOKS_PER_LIMIT
        taken = take_snapshots(self._directory, processes, self._limits)
        snapshots = self._with_usual_limit(tuple(self._without_beats(snapshot) for snapshot in taken))
        if not any(snapshot.is_overdue for snapshot in snapshots):
            return None
        verdict = judge_stall(snapshots)
        if self._is_part:
            return Stall(verdict or StallVerdict(StallKind.BUSY), snapshots)
        if verdict is None or not self._is_news(verdict, snapshots):
            return None
        return Stall(verdict, snapshots)

    def _is_due(self, rank: int, beat: Beat) -> bool:
        limit = self._limits[rank]
        return limit.silence(beat) > (self._limit if _writes_no_beats(beat) else limit.limit(beat, usual=True))

    def _with_usual_limit(self, snapshots: tuple[RankSnapshot, ...]) -> tuple[RankSnapshot, ...]:
        """Takes back the longer limit of phases that are slow where all ranks wait already, at different lines."""
        waits = not self._is_part and all(snapshot.waits_in for snapshot in snapshots)
        if not waits or len({snapshot.frame for snapshot in snapshots}) < 2:
            return snapshots
        unknown = SilenceLimit(self._limit)  # of a rank whose first heartbeat came after the look at all
        limits = [self._limits.get(each.rank, unknown).limit(each.beat, usual=True) for each in snapshots]
        return tuple(replace(snapshot, limit=limit) for snapshot, limit in zip(snapshots, limits))

    def _without_beats(self, snapshot: RankSnapshot) -> RankSnapshot:
        """Measures the silence of a script without heartbeats by how long its snapshot stays the same."""
        if not _writes_no_beats(snapshot.beat):
            return snapshot
        place = snapshot.stack, snapshot.collectives[-1:], snapshot.state, snapshot.beat.time
        former, since = self._places.get(snapshot.rank, (None, 0.0))
        if place != former:
            since = time.monotonic()
            self._places[snapshot.rank] = place, since
        return replace(snapshot, silence=time.monotonic() - since, limit=self._limit)

    def _is_news(self, verdict: StallVerdict, snapshots: Sequence[RankSnapshot]) -> bool:
        """True if the verdict is to be reported: a run that may still continue is reported once for each position.

        A script without heartbeats is not reported then: the same line of code is no sign of a stall.
        """
        if verdict.is_deadlock:
            return True
        busy = [each for each in snapshots if each.rank in verdict.culprits]
        beats = [(each.rank, each.beat) for each in busy if not _writes_no_beats(each.beat)]
        place = tuple((rank, beat.position) for rank, beat in beats)
        if not place or place in self._reported:
            return False
        self._reported.add(place)
        return True


def _writes_no_beats(beat: Beat) -> bool:
    return beat.phase == "start" and beat.membership is Membership.OUTSIDE
