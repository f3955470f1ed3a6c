"""Decides, from how every rank ended, how the run ended and which rank was the cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RANK
from lockstep.launch.beat import Beat, Membership
from lockstep.launch.control import StopReason
from lockstep.launch.records import ErrorRecord

_KNOWN_CODES = range(2, 7)
"""Exit codes with a meaning of ours, which ``sys.exit`` in a rank may use as well."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    pid: int
    code: int
    """Exit code, or minus the number of the signal that killed it."""
    time: float
    killer: str = ""
    """Who killed it, where a signal does not say it all."""
    ended_by_us: bool = False
    """Whether the supervisor had told it to end before it did."""
    beat: Beat | None = None
    record: ErrorRecord | None = None
    host: str = ""
    """Where it ran; empty: on the host of the supervisor that reports."""
    logs: str = ""
    """The log folder there; empty: the reporting supervisor's."""
    last_lines: tuple[str, ...] = ()
    """Of its output, where that lies on another host."""

    @property
    def is_consequence(self) -> bool:
        """Whether its failure says no more than that another rank has gone."""
        return self.record is not None and self.record.is_consequence

    @property
    def moment(self) -> float:
        """When it went wrong: when the exception came up, else when the process ended."""
        return self.record.time if self.record else self.time

    @property
    def left_company(self) -> bool:
        """Whether it ended well, or wanted to, without parting in agreement from a shared group."""
        membership = Membership.OUTSIDE if self.beat is None else self.beat.membership
        if self.code == EXIT_DONE:
            return membership not in (Membership.FINISHED, Membership.SPARE)
        return (self.ended_by_us or self.is_consequence) and membership is Membership.LEAVING

    @property
    def was_spare(self) -> bool:
        """Whether it was killed, and the others go on without it."""
        return self.code < 0 and self.beat is not None and self.beat.membership is Membership.SPARE

    @property
    def was_in_group(self) -> bool:
        """Whether it was in a process group of ours when it ended."""
        return self.beat is not None and self.beat.membership in (Membership.JOINED, Membership.LEAVING)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the run ended."""

    code: int
    cause: RankEnd | None = None
    """The rank that failed first; None where none did."""
    left_early: bool = False
    """Whether the cause is that this rank left while the others went on."""


def judge(ends: Sequence[RankEnd], reason: StopReason) -> Verdict:
    """The verdict over a run whose ranks have all ended.

    Args:
        ends: one for each rank.
        reason: why the ranks were asked to stop, if they were.
    """
    asked = {EXIT_DONE} | ({EXIT_PREEMPTED, EXIT_INTERRUPTED} if reason is not StopReason.NONE else set())
    failed = [end for end in ends if end.code not in asked and not end.ended_by_us and not end.was_spare]
    own = [end for end in failed if not end.is_consequence]
    stopped = [end for end in ends if end.code in asked - {EXIT_DONE}]
    if reason is not StopReason.NONE and not (own and _first(own).moment < _earliest(stopped)):
        finished = all(end.code == EXIT_DONE for end in ends) and reason is StopReason.PREEMPTED
        return Verdict(code=EXIT_DONE if finished else int(reason))
    if own:
        cause = _first(own)
        return Verdict(code=int(reason) or _code_of(cause), cause=cause)
    left = [end for end in ends if end.left_company]
    if 0 < len(left) < len(ends) and (failed or any(end.ended_by_us for end in ends)):
        return Verdict(code=EXIT_RANK, cause=_first(left), left_early=True)
    if failed:
        return Verdict(code=EXIT_RANK, cause=_first(failed))
    return Verdict(code=EXIT_DONE)


def _code_of(end: RankEnd) -> int:
    if end.record is not None:
        return end.record.exit_code
    return end.code if end.code in _KNOWN_CODES else EXIT_RANK


def _first(ends: Iterable[RankEnd]) -> RankEnd:
    return min(ends, key=lambda end: (end.moment, end.rank))


def _earliest(ends: Iterable[RankEnd]) -> float:
    return min((end.moment for end in ends), default=float("inf"))
