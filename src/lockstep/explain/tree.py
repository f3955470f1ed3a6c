"""The picture of the gradient tree: how micro-batches fold into one sum, and which additions each rank does alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.core.plan import BatchShape, share
from lockstep.core.summation_tree import Node, children, fold, nodes_within
from lockstep.errors import ConfigError
from lockstep.explain.drawing import (
    WIDTH,
    Chosen,
    Drawing,
    at_least_one,
    folded_table,
    left_out,
    paragraph,
    rank_style,
    short,
)
from lockstep.text import plural

MOST_ROWS = 32
MOST_RANKS = 16
MOST_MICRO_BATCHES = 1 << 20
_MOST_TERMS = 16


@dataclass(frozen=True)
class RankShare:
    """The part of a rank in the sum: the micro-batches from ``start`` up to ``stop``."""

    rank: int
    start: int
    stop: int
    """``start`` if it has no micro-batch in this step."""
    nodes: tuple[Node, ...]
    """Partial sums that it computes alone and hands over."""


@dataclass(frozen=True)
class Branch:
    """A drawn node."""

    node: Node
    rank: int | None
    """The rank that adds it up alone; None where values of several ranks meet."""
    handed_over: bool
    """True if that rank hands over this node."""
    children: tuple[Branch, ...]
    """The two that are added; none for a micro-batch, or where the rest is left out."""

    @property
    def level(self) -> int:
        """Additions on the longest way down in the picture."""
        return 1 + max(child.level for child in self.children) if self.children else 0

    def rows(self) -> Iterator[Branch]:
        """The outermost drawn branches, in order of k."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.rows()


@dataclass(frozen=True)
class TreeFacts:
    """The contents of the picture."""

    micro_batches: int
    leaves: int
    ranks: Chosen
    holders: tuple[RankShare, ...]
    """Of the listed ranks."""
    most_nodes: int
    """The most nodes that any rank hands over."""
    root: Branch
    below: str
    """Names what is left out below the outermost branches; empty if nothing."""
    sum: str
    """All additions with their brackets; empty for many."""

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return {
            "micro_batches": self.micro_batches,
            "leaves": self.leaves,
            "ranks": self.ranks.total,
            "most_nodes": self.most_nodes,
            "sum": self.sum,
            "left_out": [part for part in (self.below, self.ranks.left_out("rank")) if part],
            "holders": [
                {
                    "rank": h.rank,
                    "micro_batches": [h.start, h.stop],
                    "nodes": [[n.start, n.stop] for n in h.nodes],
                }
                for h in self.holders
            ],
            "tree": _nested(self.root),
        }


def explain_tree(*, micro_batches: int | None = None, ranks: int = 2, leaves: int | None = None) -> TreeFacts:
    """The gradient tree of a step and the parts of the ranks in it.

    Args:
        micro_batches: K of the recipe; by default 8, or the number of ranks if that is larger.
        ranks: data-parallel ranks, each with consecutive micro-batches.
        leaves: micro-batches that are not empty, fewer than K in an incomplete last step; by default K.

    Raises:
        ConfigError: the numbers do not fit together.
    """
    micro_batches = max(8, ranks) if micro_batches is None else micro_batches
    at_least_one(micro_batches=micro_batches, ranks=ranks)
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(f"--micro-batches={micro_batches} is too many to draw. Use at most {MOST_MICRO_BATCHES}.")
    BatchShape(global_batch=micro_batches, micro_batches=micro_batches).check_holders(ranks)
    count = micro_batches if leaves is None else leaves
    if not 1 <= count <= micro_batches:
        raise ConfigError(f"--leaves={count} does not fit --micro-batches={micro_batches}. Use 1 to {micro_batches}.")
    parts = [share(count, ranks, rank) for rank in range(ranks)]
    holders = [
        RankShare(rank, part.start, part.stop, tuple(nodes_within(part.start, part.stop, count)))
        for rank, part in enumerate(parts)
    ]
    shown = Chosen.of(ranks, MOST_RANKS)
    levels, below = None, ""
    if count > MOST_ROWS:
        # As many as fit beside each other in a terminal
        levels = (WIDTH - 24) // (len(f"[k{count}..k{count}]") + 5)
        below = "what is added below the nodes on the left"
    root = _branch(Node(0, count), holders, levels)
    listed = tuple(holders[rank] for rank in shown.shown)
    most = max(len(holder.nodes) for holder in holders)
    return TreeFacts(micro_batches, count, shown, listed, most, root, below, _sum(count))


def _branch(node: Node, holders: list[RankShare], levels: int | None) -> Branch:
    """A node and all below it, or only ``levels`` additions of values of several ranks."""
    rank = _alone(node, holders)
    ends = levels is not None and (levels == 0 or rank is not None)
    below: tuple[Branch, ...] = ()
    if node.leaves > 1 and not ends:
        further = None if levels is None else levels - 1
        below = tuple(_branch(child, holders, further) for child in children(node))
    return Branch(node, rank, rank is not None and node in holders[rank].nodes, below)


def _alone(node: Node, holders: list[RankShare]) -> int | None:
    rank = bisect_right(holders, node.start, key=lambda holder: holder.start) - 1
    while holders[rank].start == holders[rank].stop and rank:
        rank -= 1
    return rank if node.stop <= holders[rank].stop else None


def _sum(leaves: int) -> str:
    if not 1 < leaves <= _MOST_TERMS:
        return ""
    terms = {Node(k, k + 1): f"k{k}" for k in range(leaves)}
    return fold(terms, leaves, lambda left, right: f"({left}+{right})")[1:-1]


def _nested(branch: Branch) -> dict[str, Any]:
    found: dict[str, Any] = {"node": [branch.node.start, branch.node.stop], "rank": branch.rank}
    return found | ({"adds": [_nested(child) for child in branch.children]} if branch.children else {})


def tree_text(facts: TreeFacts) -> str:
    """The tree from its micro-batches on the left to the sum on the right, and a table of the ranks."""
    lines = [*paragraph(headline(facts)), "", *_picture(facts.root), ""]
    rows = [(f"rank {holder.rank}", _holder_cells(holder)) for holder in facts.holders]
    lines += folded_table(["micro-batches", "additions alone", "hands over"], rows)
    lines += ["", *paragraph(verdict(facts))]
    if facts.sum:
        lines += paragraph(f"sum = {facts.sum}")
    lines += left_out(*not_drawn(facts))
    return "\n".join(lines)


def headline(facts: TreeFacts) -> str:
    """The given numbers."""
    ragged = f", {facts.leaves:,} of them not empty," if facts.leaves < facts.micro_batches else ""
    micro_batches = plural(facts.micro_batches, "micro-batch")
    return f"The gradients of {micro_batches}{ragged} on {plural(facts.ranks.total, 'rank')}"


def verdict(facts: TreeFacts) -> str:
    """The meaning of the picture."""
    words = (
        "Which values are added, and in which order, depends on the number of micro-batches alone; so the sum has the "
        f"same bits on any number of ranks up to {facts.micro_batches:,}."
    )
    if facts.most_nodes > 1:
        words += f" A rank hands over up to {facts.most_nodes} nodes here: its micro-batches are not one node."
    return words


def not_drawn(facts: TreeFacts) -> list[str]:
    """The parts that the picture leaves out."""
    return [facts.below, facts.ranks.left_out("rank")]


def node_words(node: Node) -> str:
    """Such as ``k3`` or ``k0..k3``."""
    return f"k{node.start}" if node.leaves == 1 else f"k{node.start}..k{node.stop - 1}"


def _holder_cells(holder: RankShare) -> list[str]:
    if holder.start == holder.stop:
        return ["none in this step", "0", "nothing, and joins every exchange"]
    nodes = [node_words(node) for node in holder.nodes]
    named = nodes if len(nodes) <= 4 else [*nodes[:2], f".. {len(nodes) - 3} more ..", nodes[-1]]
    alone = sum(node.leaves - 1 for node in holder.nodes)
    return [node_words(Node(holder.start, holder.stop)), str(alone), ", ".join(named)]


def _picture(root: Branch) -> list[str]:
    outermost = list(root.rows())
    label = max(len(_label(branch)) for branch in outermost)
    ranks = [branch.rank for branch in outermost]
    names = ["" if rank in (None, before) else f"rank {rank}" for rank, before in zip(ranks, [None, *ranks])]
    lead = max(map(len, names)) + 2
    step = max(len(_label(branch)) for branch in _all(root)) + 5
    grid = [[" "] * (lead + label + step * root.level + 8) for _ in range(2 * len(outermost) - 1)]
    for number, name in enumerate(names):
        _write(grid, 2 * number, 0, name)

    def column(branch: Branch) -> int:
        return lead + (0 if not branch.level else label + 5 + step * (branch.level - 1))

    def draw(branch: Branch, first: int) -> tuple[int, int]:
        """Draws what begins in row ``first``; returns the row of the branch and the row after it."""
        if not branch.children:
            _write(grid, first, column(branch), _label(branch))
            return first, first + 2
        left, after = draw(branch.children[0], first)
        right, after = draw(branch.children[1], after)
        row, bar = (left + right) // 2, column(branch) - 3
        for child, place in zip(branch.children, (left, right)):
            start = column(child) + len(_label(child)) + 1
            _write(grid, place, start, "-" * (bar - start) + "+")
        for between in range(left + 1, right):
            _write(grid, between, bar, "|")
        _write(grid, row, bar, "+- " + _label(branch))
        return row, after

    draw(root, 0)
    return ["".join(line).rstrip() for line in grid]


def _label(branch: Branch) -> str:
    words = node_words(branch.node)
    return f"[{words}]" if branch.handed_over else words


def _all(branch: Branch) -> list[Branch]:
    return [branch, *(found for child in branch.children for found in _all(child))]


def _write(grid: list[list[str]], row: int, column: int, words: str) -> None:
    grid[row][column : column + len(words)] = words


_WIDTH, _HEIGHT, _STEP, _ROW = 84.0, 24.0, 134.0, 32.0
_LEAD, _TOP = 84.0, 44.0


def tree_svg(facts: TreeFacts) -> str:
    """Micro-batches on the left, their sum on the right; thick lines are values that go to other ranks."""
    drawing = Drawing(headline(facts))
    _draw_branch(drawing, facts.root, _TOP)
    previous: int | None = None
    for number, row in enumerate(facts.root.rows()):
        if row.rank is not None and row.rank != previous:
            drawing.text(0, _TOP + number * _ROW + _HEIGHT / 2, f"rank {row.rank}")
            previous = row.rank
    drawing.caption("A colour is a rank, which adds up those nodes alone; thick lines are values that are handed over.")
    drawing.caption(verdict(facts))
    drawing.caption(*([f"sum = {facts.sum}"] if facts.sum else []), *left_out(*not_drawn(facts)))
    return drawing.svg()


def _draw_branch(drawing: Drawing, branch: Branch, top: float) -> tuple[float, float]:
    """Draws what begins at height ``top``; returns the middle of the branch's box, and the height after it."""
    x = _LEAD + branch.level * _STEP
    middle, after = top + _HEIGHT / 2, top + _ROW
    if branch.children:
        first, after = _draw_branch(drawing, branch.children[0], top)
        second, after = _draw_branch(drawing, branch.children[1], after)
        middle = (first + second) / 2
        heights = zip(branch.children, (first, second))
        # Thick lines above thin ones
        for child, height in sorted(heights, key=lambda pair: pair[0].handed_over):
            right, turn = _LEAD + child.level * _STEP + _WIDTH, x - (_STEP - _WIDTH) / 2
            style = "strong-edge" if child.handed_over else "edge"
            drawing.line([(right, height), (turn, height), (turn, middle), (x, middle)], style)
    style = "blank" if branch.rank is None else rank_style(branch.rank)
    drawing.box(x, middle - _HEIGHT / 2, _WIDTH, _HEIGHT, style, short(node_words(branch.node), _WIDTH))
    return middle, after
