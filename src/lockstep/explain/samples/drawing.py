"""The picture of the samples as SVG: a box for each sample, in the colour of its rank."""

from __future__ import annotations

from lockstep.explain.samples.facts import Part, Samples, Scheme
from lockstep.explain.samples.terminal import classic_verdict, headline, not_drawn, our_verdict
from lockstep.explain.svg import LETTER, Drawing, rank_style
from lockstep.explain.words import left_out

_LEAST_BOX, _HEIGHT, _MOST_BOXES = 34.0, 28.0, 4
_LEAD, _GAP = 84.0, 26.0


def samples_svg(facts: Samples) -> str:
    """One row of boxes for each rank; a sample that is read again stands out."""
    drawing = Drawing(headline(facts))
    if facts.classic:
        _scheme(drawing, "torch's DistributedSampler", facts, facts.classic)
        drawing.caption(classic_verdict(facts, facts.classic).replace("marked *", "in red"))
    else:
        drawing.caption(facts.why_no_classic)
    _scheme(drawing, "Lockstep", facts, facts.ours)
    drawing.caption(our_verdict(facts))
    for line in left_out(*not_drawn(facts)):
        drawing.caption(line)
    return drawing.svg()


def _scheme(drawing: Drawing, name: str, facts: Samples, scheme: Scheme) -> None:
    top = drawing.bottom + 26
    drawing.text(0, top, name, "strong")
    numbered = any(part.micro_batch is not None for row in scheme.cells for cell in row for part in cell)
    box = max(_LEAST_BOX, 12 * LETTER * len(str(facts.samples - 1)) + 6)
    row_height = _HEIGHT + (26 if numbered else 12)
    x = _LEAD
    for column, step in enumerate(scheme.steps.shown):
        if scheme.steps.gap_before(step):
            drawing.text(x, top + 26 + row_height / 2, "...", "soft")
            x += 34
        cells = [row[column] for row in scheme.cells]
        drawing.text(x, top + 22, f"step {step}", "soft", size=12)
        widths = [
            _cell(drawing, x, top + 36 + number * row_height, rank, cell, box)
            for number, (rank, cell) in enumerate(zip(facts.ranks.shown, cells))
        ]
        x += max([*widths, 60.0]) + _GAP
    for number, rank in enumerate(facts.ranks.shown):
        y = top + 36 + number * row_height
        drawing.text(0, y + _HEIGHT / 2, f"rank {rank}")
        if facts.ranks.gap_before(rank):
            drawing.text(0, y - 7, "...", "soft")


def _cell(drawing: Drawing, left: float, y: float, rank: int, parts: tuple[Part, ...], box: float) -> float:
    """Draws what a rank reads in a step; returns the width."""
    x = left
    for part in parts[:2]:
        start = x
        for sample, again in _some(part):
            if sample is None:
                drawing.text(x + 4, y + _HEIGHT / 2, "..", "soft")
                x += 24
                continue
            style = "alarm" if again else rank_style(rank)
            drawing.box(x, y, box, _HEIGHT, style, str(sample))
            x += box + 2
        if part.micro_batch is not None:
            drawing.text(
                (start + x - 2) / 2, y + _HEIGHT + 8, f"k{part.micro_batch}", "soft", size=11, at="middle"
            )
        x += 8
    if len(parts) > 2:
        drawing.text(x, y + _HEIGHT / 2, f"+ {len(parts) - 2}", "soft")
        x += 30
    return x - left


def _some(part: Part) -> list[tuple[int | None, bool]]:
    pairs: list[tuple[int | None, bool]] = list(zip(part.samples, part.again))
    return pairs if len(pairs) <= _MOST_BOXES else [*pairs[:2], (None, False), pairs[-1]]
