"""The picture of a pipeline as SVG: all schedules on one scale of time."""

from __future__ import annotations

from lockstep.explain.pipeline.facts import Pipeline, Timeline
from lockstep.explain.pipeline.terminal import LEGEND, headline, pass_words, title, verdict
from lockstep.explain.svg import Drawing, rank_style, short
from lockstep.explain.words import left_out
from lockstep.strategies.pipeline.schedule import Action

_LEAD, _WIDTH, _ROW, _HEIGHT = 84.0, 860.0, 30.0, 26.0
_LEAST_UNIT = 3.0
_FORWARD, _BACKWARD = (0, 5, 3), (1, 6, 4)


def pipeline_svg(facts: Pipeline) -> str:
    """A row of boxes for each rank; blue are forward passes, orange backward passes."""
    drawing = Drawing(headline(facts))
    longest = max(times.length / times.stages_per_rank for times in facts.timelines)
    finest = max(times.stages_per_rank for times in facts.timelines)
    unit = max(_WIDTH / longest, _LEAST_UNIT * finest)
    for times in facts.timelines:
        _timeline(drawing, facts, times, unit / times.stages_per_rank)
    drawing.caption(
        f"Blue: forward, orange: backward; green and yellow: of the rank's second stage. {LEGEND}"
    )
    for sentence in facts.refused:
        drawing.caption(sentence)
    return drawing.svg()


def _timeline(drawing: Drawing, facts: Pipeline, times: Timeline, unit: float) -> None:
    """One schedule; ``unit`` is the width of a forward pass through a stage."""
    top = drawing.bottom + 26
    most = int(4 * _WIDTH / unit)
    drawing.text(0, top, title(times), "strong")
    for row, (rank, spans) in enumerate(zip(facts.ranks.shown, times.spans)):
        y = top + 18 + row * _ROW
        drawing.text(0, y + _HEIGHT / 2, f"rank {rank}")
        if facts.ranks.gap_before(rank):
            drawing.text(0, y - 2, "...", "soft")
        for span in spans:
            if span.stop > most:
                break
            width = unit * (span.stop - span.start) - 1
            words = pass_words(span.action, facts.ranks.total, times.stages_per_rank)
            fitting = [each for each in (words, str(span.action.place)) if short(each, width) == each]
            style = _style(span.action, facts.ranks.total)
            drawing.box(_LEAD + unit * span.start, y, width, _HEIGHT, style, fitting[0] if fitting else "")
    drawing.caption(verdict(facts, times))
    late = f"units {most} to {times.length - 1} of {times.length}" if times.length > most else ""
    for line in left_out(facts.ranks.left_out("rank"), late):
        drawing.caption(line)


def _style(action: Action, ranks: int) -> str:
    colours = _FORWARD if action.forward else _BACKWARD
    return rank_style(colours[action.stage // ranks % len(colours)])
