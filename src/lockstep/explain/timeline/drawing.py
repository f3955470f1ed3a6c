"""A timeline as SVG: a row of boxes for each lane, a block of rows for each rank."""

from __future__ import annotations

from itertools import zip_longest

from lockstep.explain.svg import Drawing, rank_style, short
from lockstep.explain.timeline.facts import Box, Lane, RankLanes, Trace
from lockstep.explain.timeline.terminal import headline, verdict
from lockstep.explain.words import left_out
from lockstep.timeline.recorder import LANES

_LEAD, _WIDTH, _ROW, _HEIGHT = 256.0, 860.0, 22.0, 18.0
_LEAST = 0.4
"""Pixels; narrower boxes are put together with their neighbours."""

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


def timeline_svg(trace: Trace) -> str:
    """All ranks on one scale of time."""
    drawing = Drawing(headline(trace))
    scale = _WIDTH / trace.milliseconds
    for rank in trace.ranks:
        _rank(drawing, rank, scale, trace.milliseconds)
    for line in left_out(trace.chosen.left_out("rank")):
        drawing.caption(line)
    return drawing.svg()


def _rank(drawing: Drawing, rank: RankLanes, scale: float, milliseconds: float) -> None:
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


def _drawn(lane: Lane, scale: float) -> list[Box]:
    """The boxes, without those that nobody could tell from their neighbour."""
    found: list[Box] = []
    for box in lane.boxes:
        near = found and (box.began - found[-1].ended) * scale < _LEAST
        if near and (box.ended - box.began) * scale < 2 * _LEAST and box.began >= found[-1].ended:
            found[-1] = Box(found[-1].name, found[-1].began, box.ended)
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
