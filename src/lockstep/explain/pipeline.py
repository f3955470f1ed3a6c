"""The picture of a pipeline: the timeline of each rank under each schedule, from the functions that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from string import ascii_lowercase

from lockstep.config.strategy_options import PipelineOptions
from lockstep.errors import ConfigError, nearest
from lockstep.explain.drawing import (
    WIDTH,
    Chosen,
    Drawing,
    PictureFacts,
    at_least_one,
    left_out,
    paragraph,
    rank_style,
    short,
)
from lockstep.strategies.pipeline.schedule import (
    SCHEDULES,
    Action,
    ScheduledPass,
    bubble,
    order_of,
    timeline,
    waiting,
)
from lockstep.text import plural

MOST_RANKS = 12
MOST_PASSES = 100_000


@dataclass(frozen=True)
class ScheduleTimeline:
    """The passes of the ranks under one schedule."""

    schedule: str
    stages_per_rank: int
    spans: tuple[tuple[ScheduledPass, ...], ...]
    """Of each drawn rank; a forward pass through a stage is one unit of time, a backward pass two."""
    length: int
    """Units of the step; with several stages per rank a unit is as many times shorter."""
    waits: float
    """The share of time in which ranks wait, counted in the timeline of all ranks."""
    bubble: float
    """The same by formula."""
    kept: float
    """The most micro-batches whose activations any rank keeps at once, in units of all its stages."""


@dataclass(frozen=True)
class PipelineFacts(PictureFacts):
    """The contents of the picture."""

    ranks: Chosen
    micro_batches: int
    timelines: tuple[ScheduleTimeline, ...]
    refused: tuple[str, ...]
    """The reasons why schedules are not shown."""


def explain_pipeline(
    *,
    stages: int = 4,
    micro_batches: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    stages_per_rank: int = 2,
) -> PipelineFacts:
    """The timeline of a step in which all stages take equally long and sending takes no time.

    Args:
        stages: ranks of the pipeline, each with one stage (interleaved: with several).
        micro_batches: of the step; by default the first multiple of the stages from 8 on.
        schedules: some of ``SCHEDULES``.
        stages_per_rank: of the interleaved schedule.

    Raises:
        ConfigError: the numbers fit none of the schedules.
    """
    count = -(-8 // max(1, stages)) * stages if micro_batches is None else micro_batches
    at_least_one(stages=stages, micro_batches=count, stages_per_rank=stages_per_rank)
    if stages * stages_per_rank * count > MOST_PASSES:
        raise ConfigError(
            f"--stages={stages}, --stages-per-rank={stages_per_rank} and --micro-batches={count} make more than "
            f"{MOST_PASSES:,} passes, the most that can be drawn. Use smaller numbers."
        )
    shown = Chosen.of(stages, MOST_RANKS)
    timelines: list[ScheduleTimeline] = []
    refused: list[str] = []
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ConfigError(f"--schedule={schedule} is not known.{nearest(schedule, SCHEDULES)}")
        each = stages_per_rank if schedule == "interleaved" else 1
        try:
            PipelineOptions(schedule=schedule, stages_per_rank=each).check_micro_batches(count, 1, stages)
        except ConfigError as error:
            refused.append(str(error))
        else:
            timelines.append(_timeline(schedule, stages, each, count, shown))
    if not timelines:
        raise ConfigError(refused[0])
    return PipelineFacts(shown, count, tuple(timelines), tuple(dict.fromkeys(refused)))


def _timeline(schedule: str, ranks: int, stages_per_rank: int, count: int, shown: Chosen) -> ScheduleTimeline:
    orders = [order_of(schedule, rank, ranks, stages_per_rank, count) for rank in range(ranks)]
    spans = timeline(orders)
    # How many forward passes wait for their backward pass, after each pass of a rank
    kept = [accumulate(1 if action.forward else -1 for action in order) for order in orders]
    return ScheduleTimeline(
        schedule,
        stages_per_rank,
        tuple(tuple(spans[rank]) for rank in shown.shown),
        round(max(span.stop for mine in spans for span in mine)),
        waiting(spans),
        bubble(ranks, stages_per_rank, count),
        max(map(max, kept)) / stages_per_rank,
    )


_MOST_BLOCKS = 3


def pipeline_text(facts: PipelineFacts) -> str:
    """A line for each rank, time to the right; long timelines continue below."""
    lines = [*paragraph(headline(facts)), ""]
    for times in facts.timelines:
        lines += [title(times), *_picture(facts, times), *paragraph(verdict(facts, times)), ""]
    for words in (LEGEND, *facts.refused):
        lines += paragraph(words)
    return "\n".join(lines)


LEGEND = (
    "F: forward, B: backward (twice as long), with the number of the micro-batch; every stage takes equally long, "
    "sending takes no time. With several stages per rank, a is the first of the rank's stages."
)


def headline(facts: PipelineFacts) -> str:
    """The given numbers."""
    return f"{plural(facts.micro_batches, 'micro-batch')} through a pipeline of {plural(facts.ranks.total, 'rank')}"


def title(times: ScheduleTimeline) -> str:
    """Name of the schedule."""
    each = times.stages_per_rank
    several = f", {each} stages per rank (a pass is {each} times shorter)"
    return times.schedule + (several if each > 1 else "")


def verdict(facts: PipelineFacts, times: ScheduleTimeline) -> str:
    """The cost of the timeline in time and memory."""
    ranks, each = facts.ranks.total, times.stages_per_rank
    passes = each * facts.micro_batches
    words = (
        f"Ranks wait {100 * times.waits:.1f} % of the time; by formula (S - 1) / (S - 1 + V K) = "
        f"{ranks - 1} / {ranks - 1 + passes} = {100 * times.bubble:.1f} %. The step takes "
        f"{times.length / each:g} forward passes of a rank; a rank keeps the activations of up to "
        f"{times.kept:g} micro-batches."
    )
    return words.replace("up to 1 micro-batches", "1 micro-batch")


def pass_words(action: Action, ranks: int, stages_per_rank: int) -> str:
    """Such as ``F3``; with several stages per rank ``F3a``."""
    local = action.stage // ranks
    stage = "" if stages_per_rank == 1 else ascii_lowercase[local] if local < 26 else f".{local}"
    return f"{'F' if action.forward else 'B'}{action.place}{stage}"


def _picture(facts: PipelineFacts, times: ScheduleTimeline) -> list[str]:
    ranks = facts.ranks
    names = ranks.names("rank")
    lead = max(map(len, names)) + 2
    labels = [[pass_words(span.action, ranks.total, times.stages_per_rank) for span in mine] for mine in times.spans]
    cell = max(len(label) for mine in labels for label in mine) + 1
    lines = []
    for mine, words in zip(times.spans, labels):
        units = [f"{'..':<{cell}}"] * round(mine[-1].stop)
        for span, label in zip(mine, words):
            start, stop = round(span.start), round(span.stop)
            units[start:stop] = [f"{label:<{cell}}", *[f"{'--':<{cell}}"] * (stop - start - 1)]
        lines.append(units)
    most = (WIDTH - lead) // cell
    width = -(-times.length // -(-times.length // most))  # blocks of about one length
    blocks = list(range(0, times.length, width))
    found: list[str] = []
    for first in blocks[:_MOST_BLOCKS]:
        found += [f"from unit {first} of {times.length}:"] if first else []
        found += [
            f"{name:<{lead}}{''.join(units[first : first + width])}".rstrip() for name, units in zip(names, lines)
        ]
    late = f"units {_MOST_BLOCKS * width} to {times.length - 1} of {times.length}"
    return [*found, *left_out(ranks.left_out("rank"), late if len(blocks) > _MOST_BLOCKS else "")]


_LEAD, _WIDTH, _ROW, _HEIGHT = 84.0, 860.0, 30.0, 26.0
_LEAST_UNIT = 3.0
_FORWARD, _BACKWARD = (0, 5, 3), (1, 6, 4)


def pipeline_svg(facts: PipelineFacts) -> str:
    """A row of boxes for each rank: forward passes in blue, backward passes in orange; one scale for all schedules."""
    drawing = Drawing(headline(facts))
    longest = max(times.length / times.stages_per_rank for times in facts.timelines)
    finest = max(times.stages_per_rank for times in facts.timelines)
    unit = max(_WIDTH / longest, _LEAST_UNIT * finest)
    for times in facts.timelines:
        _draw_timeline(drawing, facts, times, unit / times.stages_per_rank)
    colours = "Blue: forward, orange: backward; green and yellow: of the rank's second stage."
    drawing.caption(f"{colours} {LEGEND}", *facts.refused)
    return drawing.svg()


def _draw_timeline(drawing: Drawing, facts: PipelineFacts, times: ScheduleTimeline, unit: float) -> None:
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
            colours = _FORWARD if span.action.forward else _BACKWARD
            style = rank_style(colours[span.action.stage // facts.ranks.total % len(colours)])
            drawing.box(_LEAD + unit * span.start, y, width, _HEIGHT, style, fitting[0] if fitting else "")
    late = f"units {most} to {times.length - 1} of {times.length}" if times.length > most else ""
    drawing.caption(verdict(facts, times), *left_out(facts.ranks.left_out("rank"), late))
