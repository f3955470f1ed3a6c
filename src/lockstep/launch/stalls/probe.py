"""Asks every rank of this host where it stands. No rank can block it: each answer has its own short limit."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launch.answering import ASK, recorder_socket, stack_file
from lockstep.launch.beat import Beat, read_beat
from lockstep.launch.stalls.pace import Pace
from lockstep.launch.stalls.sight import Collective, Sight
from lockstep.launch.stalls.stack_text import Stack, main_stack

_ANSWER_WITHIN = 0.5
_MOST_WORKERS = 8
_KEPT_COLLECTIVES = 32
_LARGEST_ANSWER = 32 << 20
_REQUEST = b"POST /handler/fr_trace_json HTTP/1.0\r\nContent-Length: 0\r\n\r\n"


def ask_all(directory: Path, processes: Mapping[int, int], paces: Mapping[int, Pace]) -> list[Sight]:
    """What is seen of each rank, by rank.

    Args:
        directory: the run directory.
        processes: process id of each rank that has not ended.
        paces: what is known of their silences.
    """
    sights = []
    for rank, pid in sorted(processes.items()):
        beat = read_beat(directory, rank)
        if beat is not None:
            pace = paces.get(rank, Pace(0.0))
            sights.append(_ask(directory, rank, pid, beat, pace))
    return sights


def _ask(directory: Path, rank: int, pid: int, beat: Beat, pace: Pace) -> Sight:
    state = process_state(pid)
    answers = state not in ("T", "t", "D", "")
    stack = _stack_of(directory, rank, pid) if answers else ()
    workers = (
        [_stack_of(directory, rank, child) for child in children(pid)[:_MOST_WORKERS]] if answers else []
    )
    return Sight(
        rank=rank,
        pid=pid,
        state=state,
        beat=beat,
        silence=pace.silence(beat),
        limit=pace.limit(beat),
        stack=stack,
        workers=tuple(
            stack for stack in workers if any("reader.py" in f.file or "fetch.py" in f.file for f in stack)
        ),
        collectives=_collectives_of(directory, rank) if answers else (),
    )


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _stack_of(directory: Path, rank: int, pid: int) -> Stack:
    """Asks one process for its stack; empty if it does not answer in time."""
    path = stack_file(directory, rank)
    try:
        start = path.stat().st_size
        os.kill(pid, ASK)
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
        return main_stack(file.read(1 << 20).decode(errors="replace"))


def _collectives_of(directory: Path, rank: int) -> tuple[Collective, ...]:
    """The last collectives of a rank's first process group, from torch's Flight Recorder; none if it is not served."""
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
