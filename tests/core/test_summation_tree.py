"""The one summation order: written out by hand, and against slower definitions of the same thing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.plan import share
from lockstep.core.summation_tree import (
    Node,
    TreeStack,
    children,
    fold,
    fold_in_place,
    fold_rows,
    merges_after_leaf,
    merges_by_level,
    nodes_within,
    push_leaf,
    push_leaves,
    row_squares,
    sum_of_squares,
)

BY_HAND = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
    9: "((((0+1)+(2+3))+((4+5)+(6+7)))+8)",
}
INTERVALS = [(start, stop, n) for n in range(1, 18) for start in range(n + 1) for stop in range(start, n + 1)]


def written(left, right):
    return f"({left}+{right})"


def leaf(k):
    return Node(k, k + 1)


def binary_counter(leaves):
    """The design's own words: carries of a binary counter, leftovers folded from the smallest."""
    stack = []
    for k in range(leaves):
        size, text = 1, str(k)
        while stack and stack[-1][0] == size:
            left_size, left = stack.pop()
            size, text = left_size + size, written(left, text)
        stack.append((size, text))
    text = stack.pop()[1]
    while stack:
        text = written(stack.pop()[1], text)
    return text


def test_trees_of_one_to_nine_leaves_have_the_shape_written_by_hand():
    found = {n: fold(((leaf(k), str(k)) for k in range(n)), n, written) for n in BY_HAND}
    assert found == BY_HAND


def test_the_tree_is_a_binary_counter():
    for leaves in (*range(1, 70), 127, 128, 129, 1000):
        found = fold(((leaf(k), str(k)) for k in range(leaves)), leaves, written)
        assert found == binary_counter(leaves), leaves


def test_a_leaf_has_no_children_and_seven_leaves_split_after_four():
    assert children(Node(0, 7)) == (Node(0, 4), Node(4, 7))
    assert children(Node(4, 7)) == (Node(4, 6), Node(6, 7))
    with pytest.raises(ValueError, match="is a leaf"):
        children(Node(3, 4))


def test_some_intervals_by_hand():
    assert nodes_within(0, 8, 8) == [Node(0, 8)]
    assert nodes_within(1, 7, 8) == [Node(1, 2), Node(2, 4), Node(4, 6), Node(6, 7)]
    assert nodes_within(3, 6, 8) == [Node(3, 4), Node(4, 6)]
    assert nodes_within(4, 7, 7) == [Node(4, 7)]
    assert nodes_within(4, 6, 7) == [Node(4, 6)]
    assert nodes_within(2, 2, 8) == []
    assert nodes_within(0, 0, 0) == []


def test_an_interval_is_tiled_by_few_nodes_that_cannot_be_larger():
    for start, stop, leaves in INTERVALS:
        nodes = nodes_within(start, stop, leaves)
        assert [k for node in nodes for k in range(node.start, node.stop)] == list(range(start, stop))
        assert len(nodes) <= max(1, 2 * (leaves - 1).bit_length())
        parents = {child: node for node in every_node(leaves) if node.leaves > 1 for child in children(node)}
        for node in nodes:
            parent = parents.get(node)
            assert parent is None or not (start <= parent.start and parent.stop <= stop), (node, start, stop)


def test_merges_after_leaf_are_those_of_the_stack():
    """The plan of merges that the gradients follow, leaf by leaf, against TreeStack."""
    for start, stop, leaves in INTERVALS:
        stack, counts = CountingStack(leaves), []
        for k in range(start, stop):
            before = stack.merges
            stack.push_leaf(k, str(k))
            counts.append(stack.merges - before)
        assert list(merges_after_leaf(start, stop, leaves)) == counts, (start, stop, leaves)
        assert list(stack.take()) == nodes_within(start, stop, leaves), (start, stop, leaves)


def test_merging_the_two_topmost_values_gives_the_nodes_of_the_tree():
    for start, stop, leaves in INTERVALS:
        stack = []
        for k, merges in zip(range(start, stop), merges_after_leaf(start, stop, leaves), strict=True):
            stack.append(str(k))
            for _ in range(merges):
                right = stack.pop()
                stack[-1] = written(stack[-1], right)
        assert stack == [written_out(node) for node in nodes_within(start, stop, leaves)], (
            start,
            stop,
            leaves,
        )


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_any_number_of_holders_gives_the_tree_of_one(leaves, holders):
    nodes = {}
    for holder in range(holders):
        stack = TreeStack(leaves, written)
        for k in share(leaves, holders, holder):
            stack.push_leaf(k, str(k))
        nodes |= stack.take()
    assert fold(nodes, leaves, written) == binary_counter(leaves)


@settings(deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_change_a_sum(leaves, random):
    order = list(range(leaves))
    random.shuffle(order)
    assert fold(((leaf(k), str(k)) for k in order), leaves, written) == binary_counter(leaves)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_folding_level_by_level_is_the_same_tree(leaves, holders):
    shares = [share(leaves, holders, holder) for holder in range(holders)]
    nodes = [node for each in shares for node in nodes_within(each.start, each.stop, leaves)]
    parts = torch.randn(len(nodes), 3, generator=torch.Generator().manual_seed(leaves))
    whole = fold(list(zip(nodes, parts.clone())), leaves, torch.add)
    assert torch.equal(fold_in_place(nodes, parts, leaves), whole)
    levels = merges_by_level(tuple(nodes), leaves)
    assert sum(len(lefts) for lefts, _ in levels) == len(nodes) - 1


def drawn(leaves, *shape):
    """Values of which another order of addition has another sum."""
    return 1e3 * torch.randn(leaves, *shape, generator=torch.Generator().manual_seed(leaves))


def whole_tree(rows):
    return fold(((leaf(k), row.clone()) for k, row in enumerate(rows)), len(rows), torch.add)


@pytest.mark.parametrize("leaves", [*range(1, 18), 31, 33, 100])
def test_rows_are_folded_in_the_order_of_the_tree(leaves):
    for rows in (drawn(leaves), drawn(leaves, 64), drawn(leaves, 4, 3)):
        before = rows.clone()
        assert torch.equal(fold_rows(rows), whole_tree(rows)) and torch.equal(rows, before)


def test_the_drawn_rows_have_another_sum_in_another_order():
    rows = drawn(33, 64)
    assert not torch.equal(fold_rows(rows.flip(0)), whole_tree(rows))


@pytest.mark.parametrize("leaves", [*range(1, 18), 31, 33])
def test_leaves_that_are_pushed_one_by_one_are_added_in_the_order_of_the_tree(leaves):
    rows, last = drawn(leaves, 64), torch.empty(64)
    alone, into, first, second = ([] for _ in range(4))
    for k, merges in enumerate(merges_after_leaf(0, leaves, leaves)):
        push_leaf(alone, rows[k].clone(), merges)
        push_leaf(into, rows[k].clone(), merges, last if k == leaves - 1 else None)
        push_leaves([first, second], [rows[k].clone(), 2 * rows[k]], merges)
    assert [len(stack) for stack in (alone, into, first, second)] == [1] * 4
    assert all(torch.equal(stack[0], whole_tree(rows)) for stack in (alone, into, first))
    assert torch.equal(second[0], whole_tree(2 * rows))
    assert (into[0] is last) == (leaves > 1)


def test_squares_of_rows_do_not_depend_on_who_holds_them():
    tensor = drawn(7, 5, 3)
    parts = [row_squares(tensor[each.start : each.stop]) for each in (share(7, 3, holder) for holder in range(3))]
    assert torch.equal(torch.cat(parts), row_squares(tensor))
    assert torch.equal(sum_of_squares(tensor), whole_tree(row_squares(tensor)))
    assert torch.allclose(sum_of_squares(tensor), tensor.double().square().sum(), rtol=1e-14)


@pytest.mark.parametrize(
    ("tensor", "squares"),
    [
        (torch.tensor(3.0), [9.0]),
        (torch.tensor([1.0, 2.0]), [1.0, 4.0]),
        (torch.tensor([[3.0 + 4.0j]]), [25.0]),
        (torch.empty(0, 4), [0.0]),
        (torch.full((1, 2), 3e4, dtype=torch.float16), [18e8]),
    ],
)
def test_squares_are_of_rows_in_float64(tensor, squares):
    found = row_squares(tensor)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(squares, rel=1e-3)
    assert sum_of_squares(tensor).item() == pytest.approx(sum(squares), rel=1e-3)


def test_eight_nodes_are_folded_in_three_levels():
    nodes = tuple(Node(k, k + 1) for k in range(8))
    assert merges_by_level(nodes, 8) == (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 4), (2, 6)), ((0,), (4,)))


def test_levels_over_nodes_that_do_not_tile_the_tree_are_an_error():
    for nodes in ((), (Node(0, 1),), (Node(0, 1), Node(2, 3))):
        with pytest.raises(ValueError, match="do not tile"):
            merges_by_level(nodes, 3)


def test_a_missing_leaf_is_an_error_and_no_sum():
    for missing in range(7):
        with pytest.raises(ValueError, match="do not tile the 7 leaves"):
            fold(((leaf(k), 1) for k in range(7) if k != missing), 7, int.__add__)


def test_a_tree_without_leaves_has_no_sum():
    with pytest.raises(ValueError, match="do not tile the 0 leaves"):
        fold([], 0, int.__add__)


def test_what_was_taken_is_forgotten():
    stack = TreeStack(4, written)
    stack.push_leaf(0, "0")
    stack.push_leaf(1, "1")
    assert stack.take() == {Node(0, 2): "(0+1)"}
    assert stack.take() == {}


def test_in_place_adds_touch_no_leaf_that_is_not_the_left_one():
    values = [[k] for k in range(5)]

    def add(left, right):
        left[0] += right[0]
        return left

    assert fold(((leaf(k), values[k]) for k in range(5)), 5, add) is values[0]
    assert values == [[10], [1], [5], [3], [4]]


class CountingStack(TreeStack):
    """Counts the merges."""

    def __init__(self, leaves):
        super().__init__(leaves, self.count)
        self.merges = 0

    def count(self, left, right):
        self.merges += 1
        return written(left, right)


def every_node(leaves):
    nodes, open_nodes = [], [Node(0, leaves)]
    while open_nodes:
        node = open_nodes.pop()
        nodes.append(node)
        if node.leaves > 1:
            open_nodes += children(node)
    return nodes


def written_out(node):
    if node.leaves == 1:
        return str(node.start)
    left, right = children(node)
    return written(written_out(left), written_out(right))
