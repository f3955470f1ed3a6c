"""The outcome of a run on several hosts, decided by node 0: pure functions.

The first half is the JSON that hosts send each other: how ranks ended, and snapshots of stalled ranks. Times of
``time.monotonic()`` differ between hosts, so the reader adds the offset. ``decide_outcome`` is the second half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.checks import from_plain
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RANK, EXIT_STALLED
from lockstep.launch.outcome import RankEnd, furthest_step, judge, report
from lockstep.launch.restarts import find_lost_ranks
from lockstep.launch.stalls.snapshot import RankSnapshot
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import ErrorRecord
from lockstep.runtime.heartbeat import Beat
from lockstep.text import plural

_Timed = TypeVar("_Timed", RankEnd, Beat, Beat | None, ErrorRecord | None)
_LONGEST_TRACEBACK = 16384
_MOST_FRAMES = 32
_MOST_COLLECTIVES = 32


def end_to_json(end: RankEnd, *, host: str, logs: str, last_lines: Sequence[str]) -> dict[str, Any]:
    """Returns the end of a rank of this host as JSON, with what a reader on another host cannot look up."""
    record = end.record
    if record is not None:
        shown, message = _shortened(record.shown), _shortened(record.message)
        record = replace(record, traceback="", shown=shown, message=message)
    lines = tuple(map(_shortened, last_lines))
    return asdict(replace(end, record=record, host=host, logs=logs, last_lines=lines))


def end_from_json(fields: Mapping[str, Any], offset: float) -> RankEnd:
    """Reads the result of ``end_to_json``; ``offset`` is added to the other host's ``time.monotonic()``."""
    end: RankEnd = from_plain(RankEnd, fields)
    beat, record = _shifted(end.beat, offset), _shifted(end.record, offset)
    return replace(_shifted(end, offset), beat=beat, record=record)


def snapshot_to_json(snapshot: RankSnapshot) -> dict[str, Any]:
    """Returns the snapshot of a rank as JSON, without the rest of a deep stack."""
    kept = replace(
        snapshot,
        stack=snapshot.stack[:_MOST_FRAMES],
        workers=tuple(stack[:_MOST_FRAMES] for stack in snapshot.workers),
        collectives=snapshot.collectives[-_MOST_COLLECTIVES:],
        limit=min(snapshot.limit, 1e9),  # JSON has no infinity
    )
    return asdict(kept)


def snapshot_from_json(fields: Mapping[str, Any], offset: float) -> RankSnapshot:
    """Reads the result of ``snapshot_to_json``, in this host's time."""
    snapshot: RankSnapshot = from_plain(RankSnapshot, fields)
    return replace(snapshot, beat=_shifted(snapshot.beat, offset))


def _shifted(timed: _Timed, offset: float) -> _Timed:
    return None if timed is None else replace(timed, time=timed.time + offset)


def _shortened(text: str) -> str:
    """Cuts the middle out of a text that is too long to be sent."""
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[-half:]}"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run, which every host reports with the same exit code."""

    code: int
    lines: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    """Numbers of the hosts that were lost; the others may restart without them."""
    lost_at: int | None = None
    """The last step of a run that ended because something was lost; None where a restart would not help."""

    @property
    def has_failed(self) -> bool:
        """True if the logs are kept."""
        return self.code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)


def decide_outcome(
    ends: Sequence[RankEnd],
    reason: StopReason,
    *,
    lost: Mapping[int, str],
    faults: Sequence[tuple[int, Sequence[str]]] = (),
    stall: Sequence[str] = (),
    logs: Path,
) -> RunOutcome:
    """Decides how the run ended, from the ends of all ranks of the remaining hosts in the time of this host.

    ``lost`` says why each lost host is lost, as in ``host 1 (fb) closed the connection``; ``faults`` are exit code and
    lines of hosts whose ranks never started, or whose fork server was killed; ``stall`` is the report of a stalled run.
    """
    gone = tuple(lost)
    if stall:
        return RunOutcome(code=EXIT_STALLED, lines=tuple(stall), lost=gone)
    if faults:
        code, lines = faults[0]
        step = furthest_step(ends) if code == EXIT_RANK else None
        return RunOutcome(code=code, lines=tuple(lines), lost=gone, lost_at=step)
    verdict = judge(ends, reason)
    lines = report(verdict, ends, reason, logs)
    loss = find_lost_ranks(verdict, ends) if reason is StopReason.NONE else None
    lost_at = None if loss is None else loss.step
    if not lost:
        return RunOutcome(code=verdict.code, lines=tuple(lines), lost_at=lost_at)
    names = [f"{text}." for text in lost.values()]
    cause = verdict.cause
    if cause is not None and not cause.is_consequence and not verdict.left_early:
        return RunOutcome(code=verdict.code, lines=(*lines, *names), lost=gone, lost_at=lost_at)
    if reason is not StopReason.NONE:
        return RunOutcome(code=int(reason), lines=(*names, *lines), lost=gone)
    ended = f"The {plural(len(ends), 'rank')} of the other hosts ended after it."
    lost_at = None if 0 in lost else furthest_step(ends)
    return RunOutcome(code=EXIT_RANK, lines=(*names, ended), lost=gone, lost_at=lost_at)
