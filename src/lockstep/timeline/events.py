"""Spans as events of the Chrome trace format, which Perfetto and chrome://tracing show.

A rank is a process there and a lane a thread. The format: "Trace Event Format", Google 2016; X events are spans, M name
lanes, s and f are the ends of an arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.timeline.recorder import LANES, Span

Event = dict[str, Any]
_USING = ("forward", "evaluate")
"""Phases that begin with a micro-batch."""


def events(spans: Sequence[Span], *, rank: int, title: str, origin: int) -> list[Event]:
    """All events of one rank.

    Args:
        spans: of the rank; moments are nanoseconds.
        rank: number of the rank.
        title: of the rank, as it is shown.
        origin: the moment that becomes 0.
    """
    lanes = {lane: number for number, lane in enumerate(_in_order(spans), 1)}
    found: list[Event] = [
        _named("process_name", rank, 0, title),
        _sorted("process_sort_index", rank, 0, rank),
    ]
    for lane, number in lanes.items():
        found += [
            _named("thread_name", rank, number, LANES.get(lane, lane)),
            _sorted("thread_sort_index", rank, number, number),
        ]
    found += [_span(span, rank, lanes[span.lane], origin) for span in spans]
    return found + list(_arrows(spans, rank, lanes, origin))


def _in_order(spans: Iterable[Span]) -> list[str]:
    """The lanes that occur: steps, loader workers, the rank's own, then replicas' threads and devices."""
    own = list(LANES)

    def place(lane: str) -> tuple[int, int, str]:
        if lane == "step":
            return 0, 0, lane
        if lane in LANES:
            return 2, own.index(lane), lane
        if lane.startswith("load"):
            return 1, int("evaluation" in lane), lane
        return 3, 0, lane  # other threads, and devices

    return sorted({span.lane for span in spans}, key=place)


def _span(span: Span, rank: int, lane: int, origin: int) -> Event:
    return {
        "name": span.name,
        "cat": LANES.get(span.lane, span.lane),
        "ph": "X",
        "ts": _microseconds(span.began - origin),
        "dur": _microseconds(span.ended - span.began),
        "pid": rank,
        "tid": lane,
        "args": dict(span.about),
    }


def _arrows(spans: Sequence[Span], rank: int, lanes: dict[str, int], origin: int) -> Iterable[Event]:
    """An arrow from where a micro-batch was read to where it is first computed on."""
    readings = sorted((span for span in spans if _is_reading(span)), key=lambda span: span.ended)
    uses = sorted((span for span in spans if span.lane in _USING), key=lambda span: span.began)
    newest: dict[tuple[Any, Any], Span] = {}
    position = 0
    for number, use in enumerate(uses):
        while position < len(readings) and readings[position].ended <= use.began:
            newest[_key(readings[position])] = readings[position]
            position += 1
        source = newest.pop(_key(use), None)
        if source is None:
            continue
        last = max(source.began, source.ended - 1000)  # an arrow begins within a span
        common = {"name": "micro-batch", "cat": "data", "id": f"{rank}.{number}", "pid": rank}
        yield {**common, "ph": "s", "ts": _microseconds(last - origin), "tid": lanes[source.lane]}
        begun = _microseconds(use.began - origin)
        yield {**common, "ph": "f", "bp": "e", "ts": begun, "tid": lanes[use.lane]}


def _is_reading(span: Span) -> bool:
    return span.lane.startswith("load")


def _key(span: Span) -> tuple[Any, Any]:
    return span.about.get("epoch"), span.about.get("first")


def _named(kind: str, rank: int, lane: int, title: str) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": title}}


def _sorted(kind: str, rank: int, lane: int, place: int) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"sort_index": place}}


def _microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)
