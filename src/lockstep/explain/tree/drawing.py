"""The picture of the tree as SVG: what one rank adds up alone has its colour."""

from __future__ import annotations

from lockstep.explain.svg import Drawing, rank_style, short
from lockstep.explain.tree.facts import Branch, Tree
from lockstep.explain.tree.terminal import headline, node_words, not_drawn, verdict
from lockstep.explain.words import left_out

_WIDTH, _HEIGHT, _STEP, _ROW = 84.0, 24.0, 134.0, 32.0
_LEAD, _TOP = 84.0, 44.0


def tree_svg(facts: Tree) -> str:
    """Micro-batches on the left, their sum on the right; a thick line is a value that goes to other ranks."""
    drawing = Drawing(headline(facts))
    _branch(drawing, facts.root, _TOP)
    previous: int | None = None
    for number, row in enumerate(facts.root.rows()):
        if row.rank is not None and row.rank != previous:
            drawing.text(0, _TOP + number * _ROW + _HEIGHT / 2, f"rank {row.rank}")
            previous = row.rank
    drawing.caption(
        "A colour is a rank, which adds up those nodes alone; thick lines are values that are handed over."
    )
    drawing.caption(verdict(facts))
    if facts.sum:
        drawing.caption(f"sum = {facts.sum}")
    for line in left_out(*not_drawn(facts)):
        drawing.caption(line)
    return drawing.svg()


def _branch(drawing: Drawing, branch: Branch, top: float) -> tuple[float, float]:
    """Draws what begins at height ``top``; returns the middle of the branch's box, and the height after it."""
    x = _LEAD + branch.level * _STEP
    middle, after = top + _HEIGHT / 2, top + _ROW
    if branch.children:
        first, after = _branch(drawing, branch.children[0], top)
        second, after = _branch(drawing, branch.children[1], after)
        middle = (first + second) / 2
        for child, height in sorted(zip(branch.children, (first, second)), key=_handed_over):
            right, turn = _LEAD + child.level * _STEP + _WIDTH, x - (_STEP - _WIDTH) / 2
            style = "strong-edge" if child.handed_over else "edge"
            drawing.line([(right, height), (turn, height), (turn, middle), (x, middle)], style)
    style = "blank" if branch.rank is None else rank_style(branch.rank)
    drawing.box(x, middle - _HEIGHT / 2, _WIDTH, _HEIGHT, style, short(node_words(branch.node), _WIDTH))
    return middle, after


def _handed_over(child: tuple[Branch, float]) -> bool:
    """Puts thick lines over thin ones."""
    return child[0].handed_over
