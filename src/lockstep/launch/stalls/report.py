"""Decides from the snapshots of all ranks why a run is stalled, and describes it: pure functions.

The report begins with the rank that holds the others up and its line of code, then has a line for each rank.
"""

from __future__ import annotations

import json
import linecache
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.launch.stalls.snapshot import Collective, RankSnapshot
from lockstep.text import numbered


class StallKind(Enum):
    """The reason of a stall."""

    STOPPED = "a process is stopped or cannot be interrupted"
    MISSING = "a rank is missing where others wait for it"
    MISMATCH = "ranks wait in different collectives"
    NETWORK = "all ranks wait in the same collective"
    BUSY = "no rank waits for another"


@dataclass(frozen=True)
class StallVerdict:
    """The kind of a stall, and the ranks that cause it; none where all are alike."""

    kind: StallKind
    culprits: tuple[int, ...] = ()
    shown: dict[int, Collective] | None = None
    """For a mismatch: the first collective in which ranks differ, by rank."""

    @property
    def is_deadlock(self) -> bool:
        """True if the run cannot continue by itself, as far as can be seen."""
        return self.kind is not StallKind.BUSY


def judge_stall(snapshots: Sequence[RankSnapshot]) -> StallVerdict | None:
    """Judges ranks of which at least one is overdue; None while the ranks that they wait for still have time."""
    still = [snapshot for snapshot in snapshots if snapshot.state in ("T", "t", "D") and snapshot.is_overdue]
    if still:
        return StallVerdict(StallKind.STOPPED, tuple(snapshot.rank for snapshot in still))
    waiting = [snapshot for snapshot in snapshots if snapshot.waits_in]
    others = [snapshot for snapshot in snapshots if not snapshot.waits_in]
    late = tuple(snapshot.rank for snapshot in others if snapshot.is_overdue)
    if not waiting:
        return StallVerdict(StallKind.BUSY, late)
    if others:
        return StallVerdict(StallKind.MISSING, late) if late else None
    if not all(snapshot.is_overdue for snapshot in waiting):
        return None
    return _mismatch(waiting) or StallVerdict(StallKind.NETWORK)


def _mismatch(waiting: Sequence[RankSnapshot]) -> StallVerdict | None:
    """Finds the first collective in which the ranks differ, else a rank that waits at another line of code."""
    recorded = {snapshot.rank: {each.sequence: each for each in snapshot.collectives} for snapshot in waiting}
    shared = sorted(set.intersection(*(set(each) for each in recorded.values()))) if recorded else []
    for sequence in shared:
        at = {rank: each[sequence] for rank, each in recorded.items()}
        odd = _odd_ones({rank: each.signature for rank, each in at.items()})
        if odd:
            return StallVerdict(StallKind.MISMATCH, odd, at)
    odd = _odd_ones({snapshot.rank: (snapshot.waits_in, snapshot.frame) for snapshot in waiting})
    if len(odd) * 2 == len(waiting):  # no majority: the ranks that are behind hold up the others
        step = min(snapshot.beat.step for snapshot in waiting)
        behind = tuple(snapshot.rank for snapshot in waiting if snapshot.beat.step == step)
        odd = behind if len(behind) < len(waiting) else odd
    return StallVerdict(StallKind.MISMATCH, odd) if odd else None


def _odd_ones(values: dict[int, Any]) -> tuple[int, ...]:
    """The ranks that differ from the majority; of two equal halves, the one without the lowest rank."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return ()
    lowest = values[min(values)]
    usual = max(counts, key=lambda value: (counts[value], value == lowest))
    return tuple(rank for rank, value in values.items() if value != usual)


_MOST_RANKS = 12
_MOST_FRAMES = 4
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait of the kernel",
}


def describe(verdict: StallVerdict, snapshots: Sequence[RankSnapshot], bundle: Path | None = None) -> list[str]:
    """Returns the lines for the terminal, at most 25; ``bundle`` is the file with all snapshots."""
    lines = list(_headline(verdict, snapshots))
    shown = sorted(snapshots, key=lambda snapshot: (snapshot.rank not in verdict.culprits, snapshot.rank))
    lines += [f"  {_line(snapshot)}" for snapshot in shown[:_MOST_RANKS]]
    if len(shown) > _MOST_RANKS:
        lines.append(f"  and {len(shown) - _MOST_RANKS} more ranks")
    if verdict.kind is not StallKind.NETWORK and verdict.culprits:
        culprit = next(snapshot for snapshot in snapshots if snapshot.rank == verdict.culprits[0])
        frames = [frame for frame in culprit.stack if not frame.is_library] or list(culprit.stack)
        stacks = [frames[:_MOST_FRAMES]]
        stacks += [[f for f in stack if not f.is_library][:_MOST_FRAMES] for stack in culprit.workers[:1]]
        lines += [f"    {frame.text}" for frames in stacks for frame in frames]
    if bundle is not None:
        lines.append(f"All stacks and collectives: {bundle}")
    return lines


def snapshot_lines(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """Returns every rank's position and stack, for ``lockstep stacks``."""
    lines: list[str] = []
    for snapshot in snapshots:
        lines.append(_line(snapshot))
        lines += [f"    {frame.text}" for frame in snapshot.stack]
        for number, stack in enumerate(snapshot.workers):
            lines.append(f"  child process {number}:")
            lines += [f"    {frame.text}" for frame in stack]
    return lines


def report_stall(verdict: StallVerdict, snapshots: Sequence[RankSnapshot], logs: Path) -> list[str]:
    """Writes all snapshots to ``stall.json`` in the log folder, and returns the lines for the terminal."""
    bundle = logs / "stall.json"
    try:
        bundle.write_text(as_json(verdict, snapshots))
    except OSError as error:
        return [*describe(verdict, snapshots), f"Its file {bundle} could not be written: {error.strerror}."]
    return describe(verdict, snapshots, bundle)


def as_json(verdict: StallVerdict, snapshots: Sequence[RankSnapshot]) -> str:
    """Returns all snapshots as JSON, for ``stall.json``."""
    ranks = [
        {
            "rank": snapshot.rank,
            "pid": snapshot.pid,
            "state": snapshot.state,
            "silent_seconds": round(snapshot.silence, 3),
            "limit_seconds": snapshot.limit if snapshot.limit < float("inf") else None,
            "phase": snapshot.beat.phase,
            "epoch": snapshot.beat.epoch,
            "step": snapshot.beat.step,
            "micro_batch": snapshot.beat.micro_batch,
            "waits_in": snapshot.waits_in,
            "stack": [frame.text for frame in snapshot.stack],
            "workers": [[frame.text for frame in stack] for stack in snapshot.workers],
            "collectives": [each.text for each in snapshot.collectives],
        }
        for snapshot in snapshots
    ]
    found = {"kind": verdict.kind.name.lower(), "culprits": list(verdict.culprits), "ranks": ranks}
    return json.dumps(found, indent=1)


def _headline(verdict: StallVerdict, snapshots: Sequence[RankSnapshot]) -> Iterator[str]:
    by_rank = {snapshot.rank: snapshot for snapshot in snapshots}
    who = numbered("rank", verdict.culprits)
    first = by_rank[verdict.culprits[0]] if verdict.culprits else snapshots[0]
    longest = max(snapshot.silence for snapshot in snapshots)
    silent = f"no progress for {longest:.0f} s (limit {first.limit:.0f} s)"
    if verdict.kind is StallKind.STOPPED:
        state = _STATES.get(first.state, "not running")
        yield f"Stalled, {silent}: {who} is {state}, in {first.beat.position}."
    elif verdict.kind is StallKind.MISSING:
        yield f"Stalled, {silent}: the others wait for {who}, which is in {first.beat.position}{_at(first)}."
    elif verdict.kind is StallKind.MISMATCH:
        waits = "waits" if len(verdict.culprits) == 1 else "wait"
        yield f"Stalled, {silent}: {who} {waits} in another collective than the others{_at(first)}."
        for rank, collective in sorted((verdict.shown or {}).items())[:_MOST_RANKS]:
            yield f"  rank {rank} called {collective.text}"
    elif verdict.kind is StallKind.NETWORK:
        where = f"{first.waits_in}{_at(first)}"
        yield f"Stalled, {silent}: all ranks wait in {where}; the connection between them is cut or very slow."
    else:
        where = f"{first.beat.position}{_at(first)}"
        yield f"No progress for {first.silence:.0f} s: {who} is in {where}. No rank waits for it."
    if verdict.is_deadlock:
        yield (
            "If this is expected to take so long, raise the limit: lockstep run --stall-limit SECONDS, lockstep train "
            "--set run.stall_limit=SECONDS (0: wait forever)."
        )


def _at(snapshot: RankSnapshot) -> str:
    frame = snapshot.frame
    if frame is None:
        return " (its stack is not available)"
    source = linecache.getline(frame.file, frame.line).strip()
    return f" at {frame.text}" + (f": `{source[:80]}`" if source else "")


def _line(snapshot: RankSnapshot) -> str:
    state = _STATES.get(snapshot.state, f"state {snapshot.state or 'gone'}")
    doing = f"waits in {snapshot.waits_in}" if snapshot.waits_in else state
    who = f"rank {snapshot.rank} (pid {snapshot.pid}): {snapshot.beat.position}"
    place = f" at {snapshot.frame.text}" if snapshot.frame else ""
    return f"{who}, silent {snapshot.silence:.1f} s, {doing}{place}"
