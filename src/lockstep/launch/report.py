"""The one short report at the end of a run: the rank that failed first in full, the others in a line each."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch.control import StopReason
from lockstep.launch.records import log_file, record_file
from lockstep.launch.verdict import RankEnd, Verdict

_MOST_OTHERS = 8
_LAST_LOG_LINES = 5
_CRASH, _CRASH_LINES = "Fatal Python error", 8
"""What faulthandler writes first, and how much of it names the place."""
_SHOWN_SAMPLES = 8
_OUT_OF_MEMORY = "OutOfMemoryError"
_LESS_MEMORY = (
    "Two settings need less memory on each device: more micro_batches of the same global_batch, which are smaller, and "
    "strategy fsdp, which shares out parameters, gradients and optimizer state."
)


def report(verdict: Verdict, ends: Sequence[RankEnd], reason: StopReason, logs: Path) -> list[str]:
    """The lines for the terminal; none for a run that ended well."""
    if verdict.cause is not None:
        others = [end for end in ends if end is not verdict.cause]
        return [
            *_cause(verdict.cause, verdict, logs),
            *_others(others, verdict.cause),
            _logs(verdict.cause, logs),
        ]
    if verdict.code == EXIT_DONE:
        return []
    return _stop(ends, reason)


def _cause(cause: RankEnd, verdict: Verdict, logs: Path) -> Iterator[str]:
    place = f", {cause.beat.place}" if cause.beat else ""
    record = cause.record
    if verdict.left_early:
        step = f" at step {cause.beat.step}" if cause.beat and cause.beat.step >= 0 else ""
        yield f"rank {cause.rank} left{step} while others went on ({_process(cause)}, exit code 0)."
    elif record is None and cause.code < 0:
        killer = cause.killer or _signal_name(-cause.code)
        yield f"rank {cause.rank} killed by {killer}{place}{_in_hand(cause)} ({_process(cause)})"
        yield from (f"  | {line}" for line in last_lines(cause, logs))
    elif record is None:
        yield f"rank {cause.rank} ended with exit code {cause.code}{place}{_in_hand(cause)} ({_process(cause)})"
        yield from (f"  | {line}" for line in last_lines(cause, logs))
    elif record.on_purpose:
        yield f"{record.kind}: {record.message}"
        yield f"Raised on rank {cause.rank}{place}{_samples(record.samples)}. Traceback: {_file(cause, logs)}"
    else:
        where = f"{place}{_samples(record.samples)} (host {record.host}, pid {cause.pid})"
        yield f"rank {cause.rank} failed first{where}:"
        yield from record.shown.rstrip("\n").split("\n")
        if record.kind == _OUT_OF_MEMORY:
            yield _LESS_MEMORY


def _others(others: Sequence[RankEnd], cause: RankEnd) -> list[str]:
    """One line for all ranks that ended alike."""
    alike: dict[str, list[int]] = {}
    for end in others:
        alike.setdefault(_fate(end, cause), []).append(end.rank)
    lines = [f"  {_ranks(ranks)}: {fate}" for fate, ranks in alike.items()]
    left_out = len(lines) - _MOST_OTHERS
    return lines[:_MOST_OTHERS] + ([f"  and {left_out} more kinds of end"] if left_out > 0 else [])


def _fate(end: RankEnd, cause: RankEnd) -> str:
    record = end.record
    if end.is_consequence:
        return "victim, lost the connection to a rank that had gone"
    if record is not None:
        if cause.record and (record.kind, record.message) == (cause.record.kind, cause.record.message):
            return "the same error"
        return f"{record.kind}: {(record.message.splitlines() or [''])[0][:120]}"
    if end.ended_by_us:
        return "stopped after it"
    if end.code < 0:
        return f"killed by {_signal_name(-end.code)}"
    return "had finished" if end.code == EXIT_DONE else f"exit code {end.code}"


def _stop(ends: Sequence[RankEnd], reason: StopReason) -> list[str]:
    word = "Interrupted" if reason is StopReason.INTERRUPTED else "Preempted"
    willing = [end for end in ends if end.code in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)]
    forced = len(ends) - len(willing)
    steps = [end.beat.step for end in ends if end.beat and end.beat.step >= 0]
    where = f" at step {max(steps)}" if steps else ""
    if not forced:
        return [f"{word}: {_count(len(ends))} stopped{where}. Exit code {int(reason)}."]
    return [f"{word}{where}: {_count(forced)} of {len(ends)} did not stop when asked and had to be ended."]


def _count(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _in_hand(end: RankEnd) -> str:
    """The samples of the micro-batch that a rank was at when it ended without a word, if it was at one."""
    beat = end.beat
    return _samples(beat.samples) if beat and beat.phase in ("forward", "backward") else ""


def _samples(samples: Sequence[int]) -> str:
    if not samples:
        return ""
    more = f" and {len(samples) - _SHOWN_SAMPLES} more" if len(samples) > _SHOWN_SAMPLES else ""
    return f", samples {', '.join(map(str, samples[:_SHOWN_SAMPLES]))}{more}"


def last_lines(end: RankEnd, logs: Path) -> list[str]:
    """The end of a rank's output, from the place of a crash if it has one."""
    if end.logs:
        return list(end.last_lines)
    try:
        lines = log_file(logs, end.rank).read_text(errors="replace").splitlines()
    except FileNotFoundError:  # rank 0 writes to the terminal
        return []
    crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
    return lines[-_LAST_LOG_LINES:] if crash is None else lines[crash : crash + _CRASH_LINES]


def _process(end: RankEnd) -> str:
    return f"host {end.host}, pid {end.pid}" if end.host else f"pid {end.pid}"


def _logs(cause: RankEnd, logs: Path) -> str:
    return f"Logs: {cause.logs} on {cause.host}" if cause.logs else f"Logs: {logs}"


def _file(end: RankEnd, logs: Path) -> str:
    file = record_file(Path(end.logs) if end.logs else logs, end.rank)
    return f"{file} on {end.host}" if end.logs else str(file)


def _ranks(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
