"""What hosts tell each other, as JSON: how ranks ended, and what is seen of ranks that stand still.

Times of ``time.monotonic()`` differ between hosts, so whoever reads adds the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lockstep.launch.beat import Beat, Membership
from lockstep.launch.records import ErrorRecord
from lockstep.launch.stalls.sight import Collective, Sight
from lockstep.launch.stalls.stack_text import Frame, Stack
from lockstep.launch.verdict import RankEnd

_LONGEST_TRACEBACK = 16384
_MOST_FRAMES = 32
_MOST_COLLECTIVES = 32


def end_to_json(end: RankEnd, *, host: str, logs: str, last_lines: Sequence[str]) -> dict[str, Any]:
    """How a rank ended, with what a reader on another host cannot look up.

    Args:
        end: of a rank of this host.
        host: this host's name.
        logs: the log folder on this host.
        last_lines: of the rank's output.
    """
    record = end.record
    if record is not None:
        record = replace(
            record, traceback="", shown=_shortened(record.shown), message=_shortened(record.message)
        )
    known = replace(end, record=record, host=host, logs=logs, last_lines=tuple(map(_shortened, last_lines)))
    return asdict(known)


def end_from_json(fields: Mapping[str, Any], offset: float) -> RankEnd:
    """What ``end_to_json`` wrote, in this host's time.

    Args:
        fields: of the end.
        offset: seconds to add to the other host's ``time.monotonic()``.
    """
    found = dict(fields)
    beat, record = found.pop("beat"), found.pop("record")
    return RankEnd(
        **{
            **found,
            "time": found["time"] + offset,
            "beat": None if beat is None else _beat(beat, offset),
            "record": None if record is None else _record(record, offset),
            "last_lines": tuple(found["last_lines"]),
        }
    )


def sight_to_json(sight: Sight) -> dict[str, Any]:
    """What is seen of a rank."""
    kept = replace(
        sight,
        stack=sight.stack[:_MOST_FRAMES],
        workers=tuple(stack[:_MOST_FRAMES] for stack in sight.workers),
        collectives=sight.collectives[-_MOST_COLLECTIVES:],
    )
    fields = asdict(kept)
    fields["limit"] = min(sight.limit, 1e9)  # JSON has no infinity
    return fields


def sight_from_json(fields: Mapping[str, Any], offset: float) -> Sight:
    """What ``sight_to_json`` wrote, in this host's time."""
    return Sight(
        **{
            **fields,
            "beat": _beat(fields["beat"], offset),
            "stack": _stack(fields["stack"]),
            "workers": tuple(map(_stack, fields["workers"])),
            "collectives": tuple(map(_collective, fields["collectives"])),
        }
    )


def _beat(fields: Mapping[str, Any], offset: float) -> Beat:
    return Beat(
        **{
            **fields,
            "time": fields["time"] + offset,
            "membership": Membership(fields["membership"]),
            "samples": tuple(fields["samples"]),
        }
    )


def _record(fields: Mapping[str, Any], offset: float) -> ErrorRecord:
    return ErrorRecord(**{**fields, "time": fields["time"] + offset, "samples": tuple(fields["samples"])})


def _stack(frames: Sequence[Mapping[str, Any]]) -> Stack:
    return tuple(Frame(**frame) for frame in frames)


def _collective(fields: Mapping[str, Any]) -> Collective:
    sizes = tuple(tuple(size) for size in fields["sizes"])
    return Collective(**{**fields, "sizes": sizes, "types": tuple(fields["types"])})


def _shortened(text: str) -> str:
    """The beginning and the end of a text that is too long to be sent."""
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[-half:]}"
