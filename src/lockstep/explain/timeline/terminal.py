"""A timeline as text: a line for each lane."""

from __future__ import annotations

from lockstep.explain.timeline.facts import Lane, RankLanes, Trace
from lockstep.explain.words import WIDTH, left_out, paragraph

_TITLE, _SHARE = 34, 6
_BAR = WIDTH - _TITLE - _SHARE


def timeline_text(trace: Trace) -> str:
    """Time to the right, from the first event to the last; ``#`` where a lane is busy."""
    lines = paragraph(headline(trace))
    for rank in trace.ranks:
        lines += ["", rank.title]
        lines += [_line(lane, trace.milliseconds) for lane in rank.lanes]
        lines += paragraph(verdict(rank, trace.milliseconds))
    return "\n".join([*lines, *left_out(trace.chosen.left_out("rank"))])


def headline(trace: Trace) -> str:
    """How long it lasts."""
    return f"{trace.milliseconds:.4g} ms of {trace.chosen.total} rank{'s' * (trace.chosen.total != 1)}"


def verdict(rank: RankLanes, milliseconds: float) -> str:
    """What is hidden behind what."""
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
        first = int(box.began / milliseconds * _BAR)
        for cell in range(
            min(first, _BAR - 1), max(first + 1, min(_BAR, round(box.ended / milliseconds * _BAR)))
        ):
            cells[cell] = "#"
    return f"{lane.title[: _TITLE - 1]:{_TITLE}}{''.join(cells)}{_percent(lane.busy, milliseconds):>{_SHARE}}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
