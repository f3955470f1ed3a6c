"""The picture of the traffic as SVG: a line for each process, time to the right, an arrow for each message."""

from __future__ import annotations

from lockstep.explain.svg import Drawing, rank_style
from lockstep.explain.traffic.facts import Moment, Traffic, Way
from lockstep.explain.traffic.terminal import LEGEND, headline, loads, not_drawn, sizes
from lockstep.explain.words import left_out

_LEAD, _ROW = 96.0, 34.0
_NARROW, _WIDE = 144.0, 220.0
_SMALL, _LARGE = 10.0, 30.0


def traffic_svg(facts: Traffic) -> str:
    """One diagram for each way, and what its busiest process sends and receives."""
    drawing = Drawing(headline(facts))
    for way in facts.ways:
        _way(drawing, way)
    drawing.caption(LEGEND)
    return drawing.svg()


def _way(drawing: Drawing, way: Way) -> None:
    top = drawing.bottom + 28
    drawing.text(0, top, f"{way.name} (level {way.level})", "strong")
    moments = [moment for moment in way.moments if moment.messages]
    pieces = [_pieces(moment) for moment in moments]
    step, box = (_WIDE if len(moments) <= 2 else _NARROW), (_LARGE if any(pieces) else _SMALL)
    rows = {number: top + 56 + _ROW * place for place, number in enumerate(way.shown.shown)}
    for place, (number, y) in enumerate(rows.items()):
        drawing.text(0, y, way.ends[number])
        drawing.line([(_LEAD, y), (_LEAD + step * len(moments) + box, y)], "dashed")
        for column, words in enumerate([*pieces, {}]):
            drawing.box(_LEAD + step * column, y - 10, box, 20, rank_style(place), words.get(number, ""))
        if _after_a_gap(way, number):
            drawing.text(0, y - _ROW / 2, "...", "soft")
    for column, moment in enumerate(moments):
        left = _LEAD + step * column + box
        drawing.text(left - box, top + 18, moment.title, "soft", size=11)
        drawing.text(left - box, top + 33, f"{sizes(moment)} each", "soft", size=11)
        for message in moment.messages:
            drawing.line(
                [(left, rows[message.sender]), (left + step - box - 2, rows[message.receiver])], arrow=True
            )
    sent, received = loads(way)
    which = " The box says which piece a rank sends." if any(pieces) else ""
    drawing.caption(
        f"{way.how}{which} In a step {way.formula}. Most sent: {sent}. Most received: {received}."
    )
    for line in left_out(*not_drawn(way)):
        drawing.caption(line)


def _after_a_gap(way: Way, number: int) -> bool:
    """Whether processes of the same kind are left out above this one."""
    kind = way.ends[number].split()[0]
    return way.shown.gap_before(number) and way.ends[number - 1].startswith(f"{kind} ")


def _pieces(moment: Moment) -> dict[int, str]:
    """Which piece each process sends, where a process sends only one."""
    senders = [message.sender for message in moment.messages]
    return {
        message.sender: message.what.removeprefix("piece ")
        for message in moment.messages
        if senders.count(message.sender) == 1 and message.what.startswith("piece ")
    }
