"""The picture of a pipeline as text."""

from __future__ import annotations

from string import ascii_lowercase

from lockstep.explain.pipeline.facts import Pipeline, Timeline
from lockstep.explain.words import WIDTH, left_out, paragraph, plural
from lockstep.strategies.pipeline.schedule import Action

_MOST_BLOCKS = 3


def pipeline_text(facts: Pipeline) -> str:
    """A line for each rank, time to the right; long timelines go on below."""
    lines = [*paragraph(headline(facts)), ""]
    for times in facts.timelines:
        lines += [title(times), *_picture(facts, times), *paragraph(verdict(facts, times)), ""]
    return "\n".join(
        [*lines, *paragraph(LEGEND), *(line for said in facts.refused for line in paragraph(said))]
    )


LEGEND = (
    "F: forward, B: backward (twice as long), with the number of the micro-batch; every stage takes equally long, "
    "sending takes no time. With several stages per rank, a is the first of the rank's stages."
)


def headline(facts: Pipeline) -> str:
    """The numbers that were asked for."""
    return f"{plural(facts.micro_batches, 'micro-batch')} through a pipeline of {plural(facts.ranks.total, 'rank')}"


def title(times: Timeline) -> str:
    """Name of the schedule."""
    each = times.stages_per_rank
    return (
        times.schedule
        if each == 1
        else f"{times.schedule}, {each} stages per rank (a pass is {each} times shorter)"
    )


def verdict(facts: Pipeline, times: Timeline) -> str:
    """What the timeline costs."""
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


def _picture(facts: Pipeline, times: Timeline) -> list[str]:
    ranks = facts.ranks
    names = [f"{'.. ' if ranks.gap_before(rank) else ''}rank {rank}" for rank in ranks.shown]
    lead = max(map(len, names)) + 2
    labels = [
        [pass_words(span.action, ranks.total, times.stages_per_rank) for span in mine] for mine in times.spans
    ]
    cell = max(len(label) for mine in labels for label in mine) + 1
    lines = []
    for mine, words in zip(times.spans, labels):
        units = [f"{'..':<{cell}}"] * round(mine[-1].stop)
        for span, label in zip(mine, words):
            units[round(span.start)] = f"{label:<{cell}}"
            units[round(span.start) + 1 : round(span.stop)] = [f"{'--':<{cell}}"] * round(
                span.stop - span.start - 1
            )
        lines.append(units)
    most = (WIDTH - lead) // cell
    width = -(-times.length // -(-times.length // most))  # blocks of about one length
    blocks = list(range(0, times.length, width))
    found: list[str] = []
    for first in blocks[:_MOST_BLOCKS]:
        found += [f"from unit {first} of {times.length}:"] if first else []
        found += [
            f"{name:<{lead}}{''.join(units[first : first + width])}".rstrip()
            for name, units in zip(names, lines)
        ]
    late = (
        f"units {_MOST_BLOCKS * width} to {times.length - 1} of {times.length}"
        if len(blocks) > _MOST_BLOCKS
        else ""
    )
    return [*found, *left_out(ranks.left_out("rank"), late)]
