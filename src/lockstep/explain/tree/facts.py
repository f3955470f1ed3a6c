"""How the micro-batches of a step fold into the one sum, and which of the adding each rank does alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError
from lockstep.explain.words import WIDTH, Chosen, at_least_one
from lockstep.plan import BatchShape, share
from lockstep.tree import Node, children, fold, nodes_within

MOST_ROWS = 32
MOST_RANKS = 16
MOST_MICRO_BATCHES = 1 << 20
_MOST_TERMS = 16


@dataclass(frozen=True)
class Holder:
    """What a rank brings to the sum."""

    rank: int
    start: int
    """First micro-batch it computes."""
    stop: int
    """The one after its last; ``start`` if it has none in this step."""
    nodes: tuple[Node, ...]
    """What it adds up alone and hands over."""


@dataclass(frozen=True)
class Branch:
    """A node as it is drawn."""

    node: Node
    rank: int | None
    """Which rank adds it up alone; None where values of several ranks meet."""
    handed_over: bool
    """Whether that rank hands over this very node."""
    children: tuple[Branch, ...]
    """The two that are added; none for a micro-batch, or where what is below is left out."""

    @property
    def level(self) -> int:
        """Additions on the longest way down in the picture."""
        return 1 + max(child.level for child in self.children) if self.children else 0

    def rows(self) -> Iterator[Branch]:
        """The outermost branches that are drawn, in order of k."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.rows()


@dataclass(frozen=True)
class Tree:
    """All that the picture says."""

    micro_batches: int
    leaves: int
    ranks: Chosen
    holders: tuple[Holder, ...]
    """Of the ranks that are listed."""
    most_nodes: int
    """The most nodes that any rank hands over."""
    root: Branch
    below: str
    """What is left out below the outermost branches; empty if nothing."""
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


def explain_tree(*, micro_batches: int | None = None, ranks: int = 2, leaves: int | None = None) -> Tree:
    """The gradient tree of a step and the ranks' parts of it.

    Args:
        micro_batches: K of the recipe; by default 8, or as many as there are ranks.
        ranks: data-parallel ranks, which take runs of micro-batches.
        leaves: micro-batches that are not empty, fewer than K in the ragged last step; by default K.

    Raises:
        ConfigError: the numbers do not go together.
    """
    micro_batches = max(8, ranks) if micro_batches is None else micro_batches
    at_least_one(micro_batches=micro_batches, ranks=ranks)
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"--micro-batches={micro_batches} is more than is drawn. Use at most {MOST_MICRO_BATCHES}."
        )
    BatchShape(global_batch=micro_batches, micro_batches=micro_batches).check_holders(ranks)
    count = micro_batches if leaves is None else leaves
    if not 1 <= count <= micro_batches:
        raise ConfigError(
            f"--leaves={count} micro-batches that are not empty do not fit --micro-batches={micro_batches}. "
            f"Use 1 to {micro_batches}."
        )
    holders = [_holder(rank, ranks, count) for rank in range(ranks)]
    shown = Chosen.of(ranks, MOST_RANKS)
    small = count <= MOST_ROWS
    root = _branch(Node(0, count), holders, None if small else _most_levels(count))
    below = "" if small else "what is added below the nodes on the left"
    listed = tuple(holders[rank] for rank in shown.shown)
    most = max(len(holder.nodes) for holder in holders)
    return Tree(micro_batches, count, shown, listed, most, root, below, _sum(count))


def _holder(rank: int, ranks: int, leaves: int) -> Holder:
    part = share(leaves, ranks, rank)
    return Holder(rank, part.start, part.stop, tuple(nodes_within(part.start, part.stop, leaves)))


def _most_levels(leaves: int) -> int:
    """How many additions fit beside each other in a terminal."""
    label = len(f"[k{leaves}..k{leaves}]")
    return (WIDTH - 24) // (label + 5)


def _branch(node: Node, holders: list[Holder], levels: int | None) -> Branch:
    """A node and what is below it: all, or ``levels`` additions of what no rank adds up alone."""
    rank = _alone(node, holders)
    ends = levels is not None and (levels == 0 or rank is not None)
    below: tuple[Branch, ...] = ()
    if node.leaves > 1 and not ends:
        further = None if levels is None else levels - 1
        below = tuple(_branch(child, holders, further) for child in children(node))
    return Branch(node, rank, rank is not None and node in holders[rank].nodes, below)


def _alone(node: Node, holders: list[Holder]) -> int | None:
    low, high = 0, len(holders) - 1  # the last holder that starts at or before the node
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holders[middle].start <= node.start else (low, middle - 1)
    while holders[low].start == holders[low].stop and low:
        low -= 1
    return low if node.stop <= holders[low].stop else None


def _sum(leaves: int) -> str:
    if not 1 < leaves <= _MOST_TERMS:
        return ""
    terms = {Node(k, k + 1): f"k{k}" for k in range(leaves)}
    return fold(terms, leaves, lambda left, right: f"({left}+{right})")[1:-1]


def _nested(branch: Branch) -> dict[str, Any]:
    found: dict[str, Any] = {"node": [branch.node.start, branch.node.stop], "rank": branch.rank}
    return found | ({"adds": [_nested(child) for child in branch.children]} if branch.children else {})
