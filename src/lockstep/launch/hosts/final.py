"""How a run on several hosts ended, decided by node 0 from what all hosts say: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RANK, EXIT_STALLED
from lockstep.launch.control import StopReason
from lockstep.launch.recovery import furthest_step, loss_of
from lockstep.launch.report import report
from lockstep.launch.verdict import RankEnd, judge

_WELL = (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Final:
    """The end that every host reports, with the same exit code."""

    code: int
    lines: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    """Numbers of the hosts that were lost; the others may go on without them."""
    lost_at: int | None = None
    """The furthest step of a run that ended because something was lost; None where it would end so again."""

    @property
    def has_failed(self) -> bool:
        """Whether logs are worth keeping."""
        return self.code not in _WELL

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "code": self.code,
            "lines": list(self.lines),
            "lost": list(self.lost),
            "lost_at": self.lost_at,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Final:
        """What ``to_json`` wrote."""
        lines, lost = tuple(map(str, fields["lines"])), tuple(map(int, fields["lost"]))
        return cls(code=int(fields["code"]), lines=lines, lost=lost, lost_at=fields["lost_at"])


def conclude(
    ends: Sequence[RankEnd],
    reason: StopReason,
    *,
    lost: Mapping[int, str],
    faults: Sequence[tuple[int, Sequence[str]]] = (),
    stall: Sequence[str] = (),
    logs: Path,
) -> Final:
    """The end of the run.

    Args:
        ends: of all ranks of the hosts that are left, in the time of this host.
        reason: why the ranks were asked to stop, if they were.
        lost: of each lost host, by its number, what became of it, as in ``host 1 (fb) has closed the connection``.
        faults: exit code and lines of hosts whose ranks never started, or whose fork server was killed.
        stall: the report of a run that stood still.
        logs: the log folder on this host.
    """
    gone = tuple(lost)
    if stall:
        return Final(code=EXIT_STALLED, lines=tuple(stall), lost=gone)
    if faults:
        code, lines = faults[0]
        return Final(
            code=code,
            lines=tuple(lines),
            lost=gone,
            lost_at=furthest_step(ends) if code == EXIT_RANK else None,
        )
    verdict = judge(ends, reason)
    lines = report(verdict, ends, reason, logs)
    loss = loss_of(verdict, ends) if reason is StopReason.NONE else None
    lost_at = None if loss is None else loss.step
    if not lost:
        return Final(code=verdict.code, lines=tuple(lines), lost_at=lost_at)
    names = [f"{text}." for text in lost.values()]
    cause = verdict.cause
    if cause is not None and not cause.is_consequence and not verdict.left_early:
        return Final(code=verdict.code, lines=(*lines, *names), lost=gone, lost_at=lost_at)
    if reason is not StopReason.NONE:
        return Final(code=int(reason), lines=(*names, *lines), lost=gone)
    ended = f"The {_count(len(ends))} of the other hosts ended after it."
    return Final(
        code=EXIT_RANK, lines=(*names, ended), lost=gone, lost_at=None if 0 in lost else furthest_step(ends)
    )


def _count(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
