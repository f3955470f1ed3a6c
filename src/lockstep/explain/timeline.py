"""The timeline of a run: lanes of boxes for each rank, and how much of the reading is hidden behind other work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.explain.drawing import (
    WIDTH,
    Chosen,
    Drawing,
    PictureFacts,
    left_out,
    paragraph,
    rank_style,
    short,
)
from lockstep.profile import trace
from lockstep.profile.trace import LANES, Event
from lockstep.text import plural

MOST_RANKS = 4
_WAITING = LANES["data"]


@dataclass(frozen=True)
class LaneBox:
    """An interval in milliseconds from the first event of any rank."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Lane:
    """One kind of work of one rank."""

    title: str
    boxes: tuple[LaneBox, ...]
    busy: float
    """Milliseconds covered by some box."""


@dataclass(frozen=True)
class RankLanes:
    """The work of one rank."""

    title: str
    lanes: tuple[Lane, ...]
    reading: float
    """Milliseconds in which one of its workers read training samples."""
    hidden: float
    """Of those, the milliseconds in which the rank did not wait for data."""


@dataclass(frozen=True)
class TimelineFacts(PictureFacts):
    """The contents of the picture."""

    milliseconds: float
    """From the first event to the last."""
    chosen: Chosen
    ranks: tuple[RankLanes, ...]
    """The drawn ones."""


def explain_timeline(path: Path) -> TimelineFacts:
    """Reads a timeline, or that of a run folder; ``ConfigError`` if that cannot be read, is not one, or is empty."""
    events = trace.read(path)
    try:
        spans = [event for event in events if event["ph"] == "X"]
        numbers = sorted({event["pid"] for event in spans})
        origin = min((event["ts"] for event in spans), default=0.0)
        end = max((event["ts"] + event["dur"] for event in spans), default=0.0)
        chosen = Chosen.of(len(numbers), MOST_RANKS)
        ranks = tuple(_rank(events, numbers[place], origin) for place in chosen.shown)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"'{path}' is a trace of another program. Give the {trace.FILE} of a run with --profile."
        ) from error
    if not ranks:
        raise ConfigError(
            f"The timeline '{path}' is empty: the run ended before the first step to record. Record earlier steps, for "
            "example with --profile 0:5."
        )
    return TimelineFacts((end - origin) / 1000, chosen, ranks)


def _rank(events: Sequence[Event], rank: int, origin: float) -> RankLanes:
    own = [event for event in events if event["pid"] == rank]
    names = {(event["name"], event["tid"]): event["args"]["name"] for event in own if event["name"].endswith("_name")}
    lanes = []
    for lane in sorted({event["tid"] for event in own if event["ph"] == "X"}):
        boxes = []
        for event in own:
            if event["ph"] == "X" and event["tid"] == lane:
                began = event["ts"] - origin
                # In whole nanoseconds, as they were noted: one that ends where another begins does not overlap it.
                times = (round(each / 1000, 6) for each in (began, began + event["dur"]))
                boxes.append(LaneBox(event["name"], *times))
        boxes.sort(key=lambda box: (box.began, -box.ended))
        lanes.append(Lane(names["thread_name", lane], tuple(boxes), _length(_union(boxes))))
    reading = _union(box for lane in lanes if lane.title.startswith("loader, worker") for box in lane.boxes)
    waiting = _union(box for lane in lanes if lane.title == _WAITING for box in lane.boxes)
    common = ((max(a, c), min(b, d)) for a, b in reading for c, d in waiting)
    hidden = _length(reading) - _length((began, ended) for began, ended in common if began < ended)
    return RankLanes(names["process_name", 0], tuple(lanes), _length(reading), hidden)


def _union(boxes: Iterable[LaneBox]) -> list[tuple[float, float]]:
    """The time that some box covers, as intervals in order that do not touch."""
    found: list[tuple[float, float]] = []
    for box in sorted(boxes, key=lambda box: box.began):
        if found and box.began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], box.ended)
        else:
            found.append((box.began, box.ended))
    return found


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in intervals)


_TITLE, _SHARE = 34, 6
_BAR = WIDTH - _TITLE - _SHARE


def timeline_text(facts: TimelineFacts) -> str:
    """Time to the right, from the first event to the last; ``#`` where a lane is busy."""
    lines = paragraph(headline(facts))
    for rank in facts.ranks:
        lines += ["", rank.title]
        lines += [_line(lane, facts.milliseconds) for lane in rank.lanes]
        lines += paragraph(verdict(rank, facts.milliseconds))
    return "\n".join([*lines, *left_out(facts.chosen.left_out("rank"))])


def headline(facts: TimelineFacts) -> str:
    """Duration and number of ranks."""
    return f"{facts.milliseconds:.4g} ms of {plural(facts.chosen.total, 'rank')}"


def verdict(rank: RankLanes, milliseconds: float) -> str:
    """The shares of waiting, of hidden reading and of hidden communication."""
    busy = {lane.title: lane.busy for lane in rank.lanes}
    waits = busy.get("waiting for data", 0.0)
    words = f"It waits for data {_percent(waits, milliseconds)} of the time."
    if rank.reading:
        reads, hidden = _percent(rank.reading, milliseconds), _percent(rank.hidden, rank.reading)
        words += f" Its workers read {reads} of the time, and {hidden} of that is hidden behind other work."
    flight, exposed = busy.get("reduce, in flight", 0.0), busy.get("reduce, exposed", 0.0)
    if flight:
        words += (
            f" Gradients are in flight {_percent(flight, milliseconds)} of the time, and waited for "
            f"{_percent(exposed, milliseconds)}."
        )
    return words


def _line(lane: Lane, milliseconds: float) -> str:
    cells = [" "] * _BAR
    for box in lane.boxes:
        first = min(int(box.began / milliseconds * _BAR), _BAR - 1)
        stop = max(first + 1, min(_BAR, round(box.ended / milliseconds * _BAR)))
        cells[first:stop] = "#" * (stop - first)
    return f"{lane.title[: _TITLE - 1]:{_TITLE}}{''.join(cells)}{_percent(lane.busy, milliseconds):>{_SHARE}}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


_LEAD, _WIDTH, _ROW, _HEIGHT = 270.0, 860.0, 22.0, 18.0
_LEAST = 0.4
"""Pixels; narrower boxes are merged with their neighbours."""

_STYLES = {
    "step": 7,
    "data": 4,
    "copy": 3,
    "compute": 7,
    "forward": 0,
    "backward": 1,
    "in flight": 6,
    "reduce": 4,
    "update": 2,
    "evaluate": 5,
}
_READING, _REST = 3, 7


def timeline_svg(facts: TimelineFacts) -> str:
    """A block of rows for each rank, a row of boxes for each lane, all on one scale of time."""
    drawing = Drawing(headline(facts))
    scale = _WIDTH / facts.milliseconds
    for rank in facts.ranks:
        _draw_rank(drawing, rank, scale, facts.milliseconds)
    drawing.caption(*left_out(facts.chosen.left_out("rank")))
    return drawing.svg()


def _draw_rank(drawing: Drawing, rank: RankLanes, scale: float, milliseconds: float) -> None:
    top = drawing.bottom + 26
    drawing.text(0, top, rank.title, "strong")
    first = top + 18
    bottom = first + _ROW * len(rank.lanes)
    for box in (box for lane in rank.lanes if lane.title == LANES["step"] for box in lane.boxes):
        x = _LEAD + box.began * scale
        drawing.line([(x, first), (x, bottom)], "dashed")
    for row, lane in enumerate(rank.lanes):
        y = first + row * _ROW
        drawing.text(0, y + _HEIGHT / 2, lane.title)
        boxes = _drawn(lane, scale)
        for box, after in zip_longest(boxes, boxes[1:]):
            width = max(1.0, (box.ended - box.began) * scale)
            seen = width if after is None else min(width, (after.began - box.began) * scale)
            words = box.name if seen == width and short(box.name, width) == box.name else ""
            drawing.box(_LEAD + box.began * scale, y, width, _HEIGHT, _style(lane), words)
    _axis(drawing, bottom + 6, scale, milliseconds)
    drawing.caption(verdict(rank, milliseconds))


def _drawn(lane: Lane, scale: float) -> list[LaneBox]:
    """The boxes, the narrowest merged with the one before them."""
    found: list[LaneBox] = []
    for box in lane.boxes:
        near = found and (box.began - found[-1].ended) * scale < _LEAST
        if near and (box.ended - box.began) * scale < 2 * _LEAST and box.began >= found[-1].ended:
            found[-1] = LaneBox(found[-1].name, found[-1].began, box.ended)
        else:
            found.append(box)
    return found


def _axis(drawing: Drawing, y: float, scale: float, milliseconds: float) -> None:
    """About five marks at round numbers of milliseconds."""
    size = 10.0 ** (len(f"{milliseconds / 5:.0f}") - 1)
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= milliseconds / 8)
    for number in range(int(milliseconds / step) + 1):
        x = _LEAD + number * step * scale
        drawing.line([(x, y), (x, y + 4)])
        drawing.text(x, y + 12, f"{number * step:g} ms", "soft", size=11, at="middle")


def _style(lane: Lane) -> str:
    if lane.title.startswith("load"):
        return rank_style(_READING)
    kind = next((kind for kind, title in LANES.items() if title == lane.title), "")
    return rank_style(_STYLES.get(kind, _REST))
