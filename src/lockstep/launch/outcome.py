"""The outcome of a run: how every rank ended, which rank was the cause, and the report for the terminal.

    RankEnd for each rank ──> judge ──> Verdict ──> report    the first failure in full, the others in a line each

``MemoryWatch`` recognises ranks that the OOM killer ended. The kernel counts its kills for each memory cgroup and for
the whole host; a rank that ends by SIGKILL while the count of this process's cgroup has risen is taken for one of them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RANK
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import ErrorRecord, log_file, record_file
from lockstep.runtime.heartbeat import Beat, Membership
from lockstep.runtime.stack_dump import unescaped
from lockstep.runtime.torch_internals import NO_THREAD, PEER_IS_LATE
from lockstep.text import format_bytes, grouped, numbered, plural, shorten

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
    """Who killed it, where the signal alone does not say it."""
    ended_by_us: bool = False
    """True if the supervisor sent it a signal before it ended."""
    beat: Beat | None = None
    record: ErrorRecord | None = None
    host: str = ""
    """Where it ran; empty: on the host of the supervisor that reports."""
    logs: str = ""
    """The log folder there; empty: the reporting supervisor's."""
    last_lines: tuple[str, ...] = ()
    """The end of its output, if that is on another host."""

    @property
    def is_consequence(self) -> bool:
        """True if its failure only says that another rank is gone."""
        return self.record is not None and self.record.is_consequence

    @property
    def moment(self) -> float:
        """The time of the exception if there was one, else of the end of the process."""
        return self.record.time if self.record else self.time

    @property
    def left_early(self) -> bool:
        """True if it ended well, or wanted to, without leaving the process group together with the others."""
        membership = Membership.OUTSIDE if self.beat is None else self.beat.membership
        if self.code == EXIT_DONE:
            return membership not in (Membership.FINISHED, Membership.INDEPENDENT)
        return (self.ended_by_us or self.is_consequence) and membership is Membership.LEAVING

    @property
    def was_independent(self) -> bool:
        """True if it was killed and the others continue without it."""
        return self.code < 0 and self.beat is not None and self.beat.membership is Membership.INDEPENDENT

    @property
    def was_in_group(self) -> bool:
        """True if it was in a process group of ours when it ended."""
        return self.beat is not None and self.beat.membership in (Membership.JOINED, Membership.LEAVING)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the run ended."""

    code: int
    cause: RankEnd | None = None
    """The rank that failed first; None where none did."""
    left_early: bool = False
    """True if the cause is that this rank left while the others continued."""


@dataclass(frozen=True, kw_only=True)
class LostRanks:
    """The ranks that a run lost for a reason that a restart may fix."""

    ranks: tuple[int, ...]
    """Those that were lost, not those that were ended because of them."""
    step: int
    """The furthest step that any rank had begun; -1 if none had."""


@dataclass(frozen=True, kw_only=True)
class WorldOutcome:
    """The outcome of one start of a run."""

    code: int
    """The exit code of the command."""
    lines: tuple[str, ...] = ()
    """The report for the terminal."""
    has_failed: bool = False
    """True if a rank failed, so that its log is kept."""
    results: tuple[Any, ...] = ()
    """The return values of a function target, by rank; None for a rank that did not return."""
    lost: LostRanks | None = None
    """The lost ranks, if that is why the run ended and a restart may help."""
    asked: StopReason = StopReason.NONE
    """Why it was asked to stop; the number is the exit code of a command that was."""
    is_reported: bool = False
    """True if the supervisor of another host prints the report on the same terminal."""


def judge(ends: Sequence[RankEnd], reason: StopReason) -> Verdict:
    """Decides how a run ended whose ranks have all ended; ``reason`` is why they were asked to stop, if they were."""
    asked = {EXIT_DONE} | ({EXIT_PREEMPTED, EXIT_INTERRUPTED} if reason is not StopReason.NONE else set())
    unasked = [end for end in ends if end.code not in asked]
    failed = [end for end in unasked if not end.ended_by_us and not end.was_independent]
    own = [end for end in failed if not end.is_consequence]
    stopped = [end for end in ends if end.code in asked - {EXIT_DONE}]
    if reason is not StopReason.NONE and not (own and all(_first(own).moment < end.moment for end in stopped)):
        finished = all(end.code == EXIT_DONE for end in ends) and reason is StopReason.PREEMPTED
        return Verdict(code=EXIT_DONE if finished else int(reason))
    if own:
        cause = _first(own)
        code = cause.code if cause.code in _KNOWN_CODES else EXIT_RANK
        code = code if cause.record is None else cause.record.exit_code
        return Verdict(code=int(reason) or code, cause=cause)
    left = [end for end in ends if end.left_early]
    if 0 < len(left) < len(ends) and (failed or any(end.ended_by_us for end in ends)):
        return Verdict(code=EXIT_RANK, cause=_first(left), left_early=True)
    if failed:
        return Verdict(code=EXIT_RANK, cause=_first(failed))
    return Verdict(code=EXIT_DONE)


def furthest_step(ends: Sequence[RankEnd]) -> int:
    """Returns the furthest step that any rank had begun; -1 if none had."""
    return max((end.beat.step for end in ends if end.beat is not None), default=-1)


def _first(ends: Iterable[RankEnd]) -> RankEnd:
    return min(ends, key=lambda end: (end.moment, end.rank))


_MOST_OTHERS = 8
_LAST_LOG_LINES = 5
_CRASH, _CRASH_LINES = "Fatal Python error", 8
"""The beginning of what faulthandler writes, and how much of it names the place."""
_SHOWN_SAMPLES = 8
_OUT_OF_MEMORY = "OutOfMemoryError"
_LESS_MEMORY = (
    "Two settings need less memory on each device: more micro_batches of the same global_batch, which are smaller, and "
    "strategy fsdp, which shards parameters, gradients and optimizer state."
)

_LONGER_TIMEOUT = (
    "It waited for another rank as long as the timeout says, and that one was still at work or elsewhere: the cause is "
    "there. Where ranks may take so long, set a longer one: run.timeout of a job, timeout= of lockstep.init."
)

_VALUES_ELSEWHERE = (
    "  Compiled code has read memory that is not there. Where fsdp, hybrid, pipeline or tensor shares parameters "
    "out, torch.tensor(p), x.new_tensor(p) and TorchScript end so in the loop: take the values with run.state_dict()."
)

_MORE_PROCESSES = (
    "A limit on threads and processes is reached. Allow more (ulimit -u, the limit on pids of a container), or start "
    "fewer ranks and loader workers."
)


def report(verdict: Verdict, ends: Sequence[RankEnd], reason: StopReason, logs: Path) -> list[str]:
    """Returns the lines for the terminal; none for a run that ended well."""
    cause = verdict.cause
    if cause is None:
        return [] if verdict.code == EXIT_DONE else [_stop(ends, reason)]
    others = [end for end in ends if end is not cause]
    where = f"Logs: {cause.logs} on {cause.host}" if cause.logs else f"Logs: {logs}"
    return [*_cause(cause, verdict, logs), *_others(others, cause), where]


def _cause(cause: RankEnd, verdict: Verdict, logs: Path) -> Iterator[str]:
    place = f", {cause.beat.position}" if cause.beat else ""
    record = cause.record
    if verdict.left_early:
        step = f" at step {cause.beat.step}" if cause.beat and cause.beat.step >= 0 else ""
        yield f"rank {cause.rank} left{step} while the others continued ({_process(cause)}, exit code 0)."
        yield "  All ranks make the same calls: look for one that is made, or a loop that is left, on some ranks only."
    elif record is None:
        killer = cause.killer or _signal_name(-cause.code)
        ended = f"killed by {killer}" if cause.code < 0 else f"ended with exit code {cause.code}"
        beat = cause.beat
        samples = _samples(beat.samples) if beat and beat.phase in ("forward", "backward") else ""
        yield f"rank {cause.rank} {ended}{place}{samples} ({_process(cause)})"
        yield from (f"  | {line}" for line in last_lines(cause, logs))
        if cause.code == -signal.SIGSEGV:
            yield _VALUES_ELSEWHERE
    elif record.on_purpose:
        yield f"{record.kind}: {record.message}"
        line = f" ({record.place})" if record.place else ""
        where = f"{place}{_samples(record.samples)}{line}"
        yield f"Raised on rank {cause.rank}{where}. Traceback: {_file(cause, logs)}"
    else:
        where = f"{place}{_samples(record.samples)} (host {record.host}, pid {cause.pid})"
        yield f"rank {cause.rank} failed first{where}:"
        yield from record.shown.rstrip("\n").split("\n")
        if record.leaves_frames_out:
            yield f"The whole traceback: {_file(cause, logs)}"
        if record.kind == _OUT_OF_MEMORY:
            yield _LESS_MEMORY
        if PEER_IS_LATE.is_in(record.message):
            yield _LONGER_TIMEOUT
        if NO_THREAD.is_in(record.message):
            yield _MORE_PROCESSES
        if "Too many open files" in record.message:
            yield "A limit on open files is reached. Raise it (ulimit -n)."


def _others(others: Sequence[RankEnd], cause: RankEnd) -> list[str]:
    """One line for all ranks that ended in the same way."""
    alike = grouped((_fate(end, cause), end.rank) for end in others)
    lines = [f"  {numbered('rank', ranks)}: {fate}" for fate, ranks in alike.items()]
    left_out = len(lines) - _MOST_OTHERS
    return lines[:_MOST_OTHERS] + ([f"  and {left_out} more kinds"] if left_out > 0 else [])


def _fate(end: RankEnd, cause: RankEnd) -> str:
    record = end.record
    if end.is_consequence:
        if cause.record is not None and cause.record.on_purpose:
            return f"disconnected by the {cause.record.kind} of rank {cause.rank}"
        return "lost the connection to a rank that was gone"
    if record is not None:
        if cause.record and (record.kind, record.message) == (cause.record.kind, cause.record.message):
            return "the same error"
        return f"{record.kind}: {(record.message.splitlines() or [''])[0][:120]}"
    if end.ended_by_us:
        return "stopped after it"
    if end.code < 0:
        return f"killed by {_signal_name(-end.code)}"
    return "had finished" if end.code == EXIT_DONE else f"exit code {end.code}"


def _stop(ends: Sequence[RankEnd], reason: StopReason) -> str:
    word = "Interrupted" if reason is StopReason.INTERRUPTED else "Preempted"
    if not any(end.pid for end in ends):
        return f"{word} before any rank had started. Exit code {int(reason)}."
    forced = sum(end.code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED) for end in ends)
    step = furthest_step(ends)
    where = f" at step {step}" if step >= 0 else ""
    if not forced:
        return f"{word}: {plural(len(ends), 'rank')} stopped{where}. Exit code {int(reason)}."
    said = f"{word}{where}: {plural(forced, 'rank')} of {len(ends)} did not stop when asked and had to be killed."
    if any(end.beat is not None and end.beat.phase == "evaluate" for end in ends):
        said += " An evaluation was going on, which run.evaluate(..., repeatable=True) would have left."
    after = "After Ctrl-C a step has 3 s to end, after SIGTERM or 'lockstep stop' the time of"
    said += f" {after if word == 'Interrupted' else 'Give more time with'} --grace, or run.grace in a job file."
    return f"{said} What came after the last checkpoint has to be done again."


def _samples(samples: Sequence[int]) -> str:
    return f", samples {shorten(samples, _SHOWN_SAMPLES)}" if samples else ""


def last_lines(end: RankEnd, logs: Path) -> list[str]:
    """Returns the end of a rank's output, from the start of a crash report if it has one."""
    if end.logs:
        return list(end.last_lines)
    try:
        lines = log_file(logs, end.rank).read_text(errors="replace").splitlines()
    except OSError:  # rank 0 writes to the terminal; or the log cannot be read
        return []
    crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
    if crash is None:
        return lines[-_LAST_LOG_LINES:]
    return [unescaped(line) for line in lines[crash : crash + _CRASH_LINES]]


def _process(end: RankEnd) -> str:
    return f"host {end.host}, pid {end.pid}" if end.host else f"pid {end.pid}"


def _file(end: RankEnd, logs: Path) -> str:
    file = record_file(Path(end.logs) if end.logs else logs, end.rank)
    if end.logs:
        return f"{file} on {end.host}"
    return str(file) if file.exists() else f"{file} could not be written"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_CGROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryWatch:
    """Watches the memory of the ranks of one host."""

    def __init__(self) -> None:
        self._kills = oom_kills()
        self._held: dict[int, int] = {}

    def look(self, processes: Mapping[int, int]) -> None:
        """Measures the memory of each rank that has not ended; ``processes`` has their process ids."""
        for rank, pid in processes.items():
            with suppress(psutil.Error, OSError):  # it has ended, or no descriptor is left
                self._held[rank] = psutil.Process(pid).memory_info().rss or self._held.get(rank, 0)

    def killer_of(self, rank: int, code: int) -> str:
        """Returns who killed a rank with that exit code, as in "killed by ..."; empty unless it was the OOM killer."""
        if code != -signal.SIGKILL or oom_kills() <= self._kills:
            return ""
        held = f"; it last held {format_bytes(self._held[rank])}" if rank in self._held else ""
        return f"the OOM killer, which ends a process when memory runs out{held}"


def oom_kills() -> int:
    """Returns the number of OOM kills in the memory cgroup of this process, or on a host without any; 0: unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            files = {"memory": f"memory{path}/memory.oom_control", "": f"{path.lstrip('/')}/memory.events"}
            counted = _count(_CGROUPS / files[controllers]) if controllers in files else None
            if counted is not None:
                return counted
    return _count(Path("/proc/vmstat")) or 0


def _count(file: Path) -> int | None:
    with suppress(OSError):
        found = _COUNT.search(file.read_text())
        return int(found[1]) if found else None
    return None
