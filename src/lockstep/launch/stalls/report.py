"""Puts a stall into words: first the rank that holds the others up and its line, then a line for each rank."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.launch.stalls.sight import Sight
from lockstep.launch.stalls.verdict import Kind, StallVerdict

_MOST_RANKS = 12
_MOST_FRAMES = 4
_STATES = {
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "D": "in an uninterruptible wait of the kernel",
}


def describe(verdict: StallVerdict, sights: Sequence[Sight], bundle: Path | None = None) -> list[str]:
    """The lines for the terminal, at most 25.

    Args:
        verdict: over these sights.
        sights: of all ranks that have not ended.
        bundle: the file with everything that was seen.
    """
    lines = list(_headline(verdict, sights))
    shown = sorted(sights, key=lambda sight: (sight.rank not in verdict.culprits, sight.rank))
    lines += [f"  {line}" for sight in shown[:_MOST_RANKS] for line in [_line(sight)]]
    if len(shown) > _MOST_RANKS:
        lines.append(f"  and {len(shown) - _MOST_RANKS} more ranks")
    if verdict.kind is not Kind.NETWORK and verdict.culprits:
        culprit = next(sight for sight in sights if sight.rank == verdict.culprits[0])
        lines += _stack_lines(culprit)
    if bundle is not None:
        lines.append(f"Everything that was seen: {bundle}")
    return lines


def sight_lines(sights: Sequence[Sight]) -> list[str]:
    """Every rank's place and stack, for ``lockstep stacks``."""
    lines: list[str] = []
    for sight in sights:
        lines.append(_line(sight))
        lines += [f"    {frame.text}" for frame in sight.stack]
        for number, stack in enumerate(sight.workers):
            lines.append(f"  process {number} that it started:")
            lines += [f"    {frame.text}" for frame in stack]
    return lines


def as_json(verdict: StallVerdict, sights: Sequence[Sight]) -> str:
    """Everything that was seen."""
    ranks = [
        {
            "rank": sight.rank,
            "pid": sight.pid,
            "state": sight.state,
            "silent_seconds": round(sight.silence, 3),
            "limit_seconds": sight.limit if sight.limit < float("inf") else None,
            "phase": sight.beat.phase,
            "epoch": sight.beat.epoch,
            "step": sight.beat.step,
            "micro_batch": sight.beat.micro_batch,
            "waits_in": sight.waits_in,
            "stack": [frame.text for frame in sight.stack],
            "workers": [[frame.text for frame in stack] for stack in sight.workers],
            "collectives": [each.text for each in sight.collectives],
        }
        for sight in sights
    ]
    found = {"kind": verdict.kind.name.lower(), "culprits": list(verdict.culprits), "ranks": ranks}
    return json.dumps(found, indent=1)


def _headline(verdict: StallVerdict, sights: Sequence[Sight]) -> Iterator[str]:
    by_rank = {sight.rank: sight for sight in sights}
    who = _ranks(verdict.culprits)
    first = by_rank[verdict.culprits[0]] if verdict.culprits else sights[0]
    silent = f"no progress for {max(sight.silence for sight in sights):.0f} s (limit {first.limit:.0f} s)"
    if verdict.kind is Kind.STOPPED:
        state = _STATES.get(first.state, "not running")
        yield f"Stalled, {silent}: {who} is {state}, in {first.beat.place}."
    elif verdict.kind is Kind.MISSING:
        yield f"Stalled, {silent}: the others wait for {who}, which is in {first.beat.place}{_at(first)}."
    elif verdict.kind is Kind.MISMATCH:
        waits = "waits" if len(verdict.culprits) == 1 else "wait"
        yield f"Stalled, {silent}: {who} {waits} in another collective than the others{_at(first)}."
        for rank, collective in sorted((verdict.shown or {}).items())[:_MOST_RANKS]:
            yield f"  rank {rank} called {collective.text}"
    elif verdict.kind is Kind.NETWORK:
        where = f"{first.waits_in}{_at(first)}"
        yield f"Stalled, {silent}: all ranks wait in {where}; the connection between them is cut or very slow."
    else:
        yield f"No progress for {first.silence:.0f} s: {who} is in {first.beat.place}{_at(first)}. Nobody waits for it."
    if verdict.is_deadlock:
        yield "If it is meant to take this long, give a larger --stall-limit SECONDS (0: wait for ever)."


def _at(sight: Sight) -> str:
    frame = sight.frame
    if frame is None:
        return " (it gives no stack)"
    source = linecache.getline(frame.file, frame.line).strip()
    return f" at {frame.text}" + (f": `{source[:80]}`" if source else "")


def _line(sight: Sight) -> str:
    doing = f"waits in {sight.waits_in}" if sight.waits_in else f"state {sight.state or 'gone'}"
    place = f" at {sight.frame.text}" if sight.frame else ""
    return f"rank {sight.rank} (pid {sight.pid}): {sight.beat.place}, silent {sight.silence:.1f} s, {doing}{place}"


def _stack_lines(sight: Sight) -> list[str]:
    frames = [frame for frame in sight.stack if not frame.is_library] or list(sight.stack)
    stacks = [frames[:_MOST_FRAMES]]
    stacks += [[f for f in stack if not f.is_library][:_MOST_FRAMES] for stack in sight.workers[:1]]
    return [f"    {frame.text}" for frames in stacks for frame in frames]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
