"""The picture of the tree as text."""

from __future__ import annotations

from lockstep.explain.tree.facts import Branch, Holder, Tree
from lockstep.explain.words import folded_table, left_out, paragraph, plural
from lockstep.tree import Node


def tree_text(facts: Tree) -> str:
    """The tree from its micro-batches on the left to the sum on the right, and what each rank hands over."""
    lines = [*paragraph(headline(facts)), "", *_picture(facts.root), ""]
    rows = [(f"rank {holder.rank}", _holder_cells(holder)) for holder in facts.holders]
    lines += folded_table("", ["micro-batches", "additions alone", "hands over"], rows)
    lines += ["", *paragraph(verdict(facts))]
    if facts.sum:
        lines += paragraph(f"sum = {facts.sum}")
    lines += left_out(*not_drawn(facts))
    return "\n".join(lines)


def headline(facts: Tree) -> str:
    """The numbers that were asked for."""
    ragged = f", {facts.leaves:,} of them not empty," if facts.leaves < facts.micro_batches else ""
    micro_batches = plural(facts.micro_batches, "micro-batch")
    return f"The gradients of {micro_batches}{ragged} on {plural(facts.ranks.total, 'rank')}"


def verdict(facts: Tree) -> str:
    """What the picture means."""
    words = (
        "Which values are added, and in which order, depends on the number of micro-batches alone; so the sum has the "
        f"same bits on any number of ranks up to {facts.micro_batches:,}."
    )
    if facts.most_nodes > 1:
        words += f" A rank hands over up to {facts.most_nodes} nodes here, since its run is not one node of the tree."
    return words


def not_drawn(facts: Tree) -> list[str]:
    """What the picture leaves out."""
    return [facts.below, facts.ranks.left_out("rank")]


def node_words(node: Node) -> str:
    """Such as ``k3`` or ``k0..k3``."""
    return f"k{node.start}" if node.leaves == 1 else f"k{node.start}..k{node.stop - 1}"


def _holder_cells(holder: Holder) -> list[str]:
    if holder.start == holder.stop:
        return ["none in this step", "0", "nothing, and joins every exchange"]
    nodes = [node_words(node) for node in holder.nodes]
    named = nodes if len(nodes) <= 4 else [*nodes[:2], f".. {len(nodes) - 3} more ..", nodes[-1]]
    alone = sum(node.leaves - 1 for node in holder.nodes)
    return [node_words(Node(holder.start, holder.stop)), str(alone), ", ".join(named)]


def _picture(root: Branch) -> list[str]:
    outermost = list(root.rows())
    label = max(len(_label(branch)) for branch in outermost)
    names = [_rank_name(branch, before) for branch, before in zip(outermost, [None, *outermost])]
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


def _rank_name(branch: Branch, before: Branch | None) -> str:
    if branch.rank is None or (before is not None and before.rank == branch.rank):
        return ""
    return f"rank {branch.rank}"


def _all(branch: Branch) -> list[Branch]:
    return [branch, *(found for child in branch.children for found in _all(child))]


def _write(grid: list[list[str]], row: int, column: int, words: str) -> None:
    grid[row][column : column + len(words)] = words
