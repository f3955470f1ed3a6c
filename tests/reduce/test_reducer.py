"""The nodes of a rank are a pure function of the leaves and the number of ranks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.summation_tree import Node, fold
from lockstep.reduce.ordered import OrderedBucket
from lockstep.reduce.reducer import BucketShape, NodeLayout, most_slots


def test_eight_leaves_on_three_ranks():
    assert NodeLayout.of(8, 3).ranks == (
        (Node(0, 2), Node(2, 3)),
        (Node(3, 4), Node(4, 6)),
        (Node(6, 8),),
    )


def test_ranks_without_leaves_bring_nothing():
    holding = NodeLayout.of(2, 4)
    assert holding.ranks == ((Node(0, 1),), (Node(1, 2),), (), ())
    assert holding.slots == 1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_what_all_ranks_bring_makes_the_tree(leaves, holders):
    holding = NodeLayout.of(leaves, holders)
    nodes = {node: (node.start, node.stop) for part in holding.ranks for node in part}
    assert fold(nodes, leaves, lambda left, right: (left[0], right[1])) == (0, leaves)
    assert holding.slots <= most_slots(leaves, holders)


def test_room_is_made_for_the_largest_step_and_not_only_for_the_full_one():
    assert most_slots(8, 1) == 1
    assert most_slots(8, 2) == max(NodeLayout.of(n, 2).slots for n in range(1, 9)) == 2
    assert NodeLayout.of(8, 2).slots == 1


def test_one_node_for_each_rank_takes_the_memory_of_two_gradients():
    bucket = OrderedBucket(BucketShape(1000, torch.float32), 2, 1, torch.device("cpu"))
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in vars(bucket).values() if isinstance(t, torch.Tensor)}
    assert sum(held.values()) == 2 * 4000
