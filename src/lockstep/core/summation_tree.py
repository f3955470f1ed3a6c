"""The one summation order: a binary tree over micro-batches.

A sum over ``n`` leaves splits at the largest power of two below ``n``; so 7 leaves are added as

        ((0+1) + (2+3)) + ((4+5) + 6)

which is what a binary counter does when each leaf is a carry and the leftovers are folded from the smallest.
The shape depends only on ``n``, never on who holds which leaf. A holder of the leaves ``[start, stop)`` can finish
the nodes that lie inside its interval (at most 2 log2 n of them) and hand those over; whoever receives all nodes
finishes the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:  # the functions on tensors import torch themselves: ``lockstep explain`` needs none
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Node:
    """The sum over the leaves ``start <= k < stop``."""

    start: int
    stop: int

    @property
    def leaves(self) -> int:
        """Number of leaves that the node sums."""
        return self.stop - self.start


def children(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum is ``node``; a leaf has none (``ValueError``)."""
    if node.leaves < 2:
        raise ValueError(f"{node} is a leaf")
    middle = node.start + (1 << ((node.leaves - 1).bit_length() - 1))
    return Node(node.start, middle), Node(middle, node.stop)


def nodes_within(start: int, stop: int, leaves: int) -> list[Node]:
    """The largest nodes of the tree over ``leaves`` that tile the interval ``[start, stop)``, left to right."""

    def tile(node: Node) -> list[Node]:
        if node.stop <= start or stop <= node.start:
            return []
        if start <= node.start and node.stop <= stop:
            return [node]
        left, right = children(node)
        return tile(left) + tile(right)

    return tile(Node(0, leaves))


class TreeStack(Generic[T]):
    """Adds leaves that arrive in order of ``k`` and merges every node as soon as both halves are there.

    Args:
        leaves: number of leaves of the whole tree (the non-empty micro-batches of the step).
        add: returns the sum of a left and a right value; it may reuse the memory of the left one.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._parents = _parents(leaves)
        self._add = add
        self._held: dict[Node, T] = {}

    def push(self, node: Node, value: T) -> None:
        """Takes one finished node, usually the leaf ``Node(k, k + 1)``."""
        parent = self._parents.get(node)
        while parent is not None:
            left, right = children(parent)
            sibling = right if node == left else left
            if sibling not in self._held:
                break
            other = self._held.pop(sibling)
            value = self._add(value, other) if node == left else self._add(other, value)
            node, parent = parent, self._parents.get(parent)
        self._held[node] = value

    def push_leaf(self, k: int, value: T) -> None:
        """Takes the value of micro-batch ``k``."""
        self.push(Node(k, k + 1), value)

    def take(self) -> dict[Node, T]:
        """Returns the nodes that are held, left to right, and forgets them."""
        held, self._held = dict(sorted(self._held.items())), {}
        return held


def fold(nodes: Mapping[Node, T] | Iterable[tuple[Node, T]], leaves: int, add: Callable[[T, T], T]) -> T:
    """Finishes the tree over ``leaves`` from nodes that tile it. ``ValueError`` if a leaf is missing."""
    stack = TreeStack[T](leaves, add)
    for node, value in nodes.items() if isinstance(nodes, Mapping) else nodes:
        stack.push(node, value)
    held = stack.take()
    root = Node(0, leaves)
    if root not in held:
        raise ValueError(f"the nodes {list(held)} do not tile the {leaves} leaves of the tree")
    return held[root]


@lru_cache(maxsize=256)
def _parents(leaves: int) -> dict[Node, Node]:
    """The parent of every node of the tree but the root; must not be changed."""
    parents: dict[Node, Node] = {}
    open_nodes = [Node(0, leaves)]
    while open_nodes:
        node = open_nodes.pop()
        if node.leaves > 1:
            for child in children(node):
                parents[child] = node
                open_nodes.append(child)
    return parents


@lru_cache(maxsize=256)
def merges_after_leaf(start: int, stop: int, leaves: int) -> tuple[int, ...]:
    """For a holder of the leaves ``[start, stop)`` that stacks them in order: how often the two topmost values merge
    after each leaf. Entry ``i`` belongs to leaf ``start + i``; in the end one value per node of ``nodes_within`` is
    left.
    """
    inside = {node for top in nodes_within(start, stop, leaves) for node in _below(top)}
    parents = _parents(leaves)
    counts = []
    for k in range(start, stop):
        node, merges = Node(k, k + 1), 0
        while (parent := parents.get(node)) in inside and parent is not None and parent.stop == k + 1:
            node, merges = parent, merges + 1
        counts.append(merges)
    return tuple(counts)


def merges_after_nodes(nodes: Iterable[Node], leaves: int) -> tuple[int, ...]:
    """For whoever stacks nodes that tile the tree, left to right: how often the two topmost values merge after each."""
    parents, stack, counts = _parents(leaves), list[Node](), list[int]()
    for node in nodes:
        stack.append(node)
        counts.append(0)
        while len(stack) > 1 and parents.get(stack[-1]) == parents.get(stack[-2]) is not None:
            stack[-2:] = [parents[stack[-1]]]
            counts[-1] += 1
    return tuple(counts)


@lru_cache(maxsize=256)
def merges_by_level(nodes: tuple[Node, ...], leaves: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """For whoever holds all nodes that tile the tree, left to right: what merges at once, level by level.

    Returns:
        Of each level, the places of the left values, where the sums go, and those of the right ones. The sum over all
        leaves is then in place 0.
    """
    parents, held = _parents(leaves), dict(enumerate(nodes))
    levels: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while len(held) > 1:
        pairs = [(a, b) for a, b in pairwise(held) if parents.get(held[a]) == parents.get(held[b], held[a])]
        if not pairs:
            break
        for left, right in pairs:
            held[left] = parents[held.pop(right)]
        lefts, rights = zip(*pairs)
        levels.append((lefts, rights))
    if held != {0: Node(0, leaves)}:
        raise ValueError(f"the nodes {list(held.values())} do not tile the {leaves} leaves of the tree")
    return tuple(levels)


def fold_in_place(nodes: Iterable[Node], parts: Tensor, leaves: int) -> Tensor:
    """The sum over the tree of what its nodes hold: one launch for each level on a GPU.

    Args:
        nodes: that tile the tree, left to right.
        parts: theirs, shape (nodes, ...); overwritten.
        leaves: of the tree.

    Returns:
        Shape (...), in the memory of ``parts``.
    """
    import torch

    for lefts, rights in merges_by_level(tuple(nodes), leaves):
        torch._foreach_add_([parts[place] for place in lefts], [parts[place] for place in rights])
    return parts[0]


def push_leaf(stack: list[Tensor], leaf: Tensor, merges: int, out: Tensor | None = None) -> None:
    """Puts a leaf on a stack of nodes, and merges the two topmost ones in place as ``merges_after_leaf`` says.

    The last merge may go to ``out`` instead, which is on the stack afterwards.
    """
    import torch

    stack.append(leaf)
    for merge in range(merges):
        right = stack.pop()
        if out is not None and merge == merges - 1:
            stack[-1] = torch.add(stack[-1], right, out=out)
        else:
            stack[-1].add_(right)


def push_leaves(stacks: Sequence[list[Tensor]], leaves: Iterable[Tensor], merges: int) -> None:
    """Puts a leaf on each of several stacks of equal height, as ``push_leaf`` does on one."""
    import torch

    for stack, leaf in zip(stacks, leaves, strict=True):
        stack.append(leaf)
    for _ in range(merges if stacks else 0):
        rights = [stack.pop() for stack in stacks]
        torch._foreach_add_([stack[-1] for stack in stacks], rights)


def _below(node: Node) -> list[Node]:
    if node.leaves < 2:
        return [node]
    left, right = children(node)
    return [node, *_below(left), *_below(right)]


def sum_of_squares(tensor: Tensor) -> Tensor:
    """The float64 sum of squares, 0-dim: within each row (index of dim 0), then over the rows in the tree's order.

    Whoever holds some rows can compute theirs, so the sum does not depend on how rows are shared out.
    """
    return fold_rows(row_squares(tensor))


def row_squares(tensor: Tensor) -> Tensor:
    """The float64 sum of squares of each row (index of dim 0), shape (rows,); a 0-dim tensor is one row."""
    import torch

    if not tensor.numel():
        return torch.zeros(1, dtype=torch.float64, device=tensor.device)
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    rows = values.reshape(tensor.shape[0] if tensor.dim() else 1, -1).double().contiguous()
    if rows.is_cuda:
        # CUDA's own sums have an order that depends on the number of rows
        return fold_rows(rows.square().t())
    squares: Tensor = torch.linalg.vecdot(rows, rows)
    return squares


def fold_rows(rows: Tensor) -> Tensor:
    """The sum over dim 0 in the tree's order: neighbours first, level by level.

    Args:
        rows: shape (n, ...), n at least 1.

    Returns:
        Shape (...).
    """
    import torch

    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        folded = rows[0:paired:2] + rows[1:paired:2]
        rows = folded if paired == rows.shape[0] else torch.cat([folded, rows[paired:]])
    return rows[0]
