"""The picture of the tree shows the additions that the reduction does."""

import pytest

from lockstep.core.summation_tree import Node, TreeStack, fold
from lockstep.errors import ConfigError
from lockstep.explain.tree import explain_tree, tree_svg, tree_text

SMALL = [(leaves, ranks) for leaves in range(1, 17) for ranks in range(1, leaves + 1)]


def drawn_sum(branch):
    """The additions with their brackets, read off the picture."""
    if not branch.children:
        assert branch.node.leaves == 1
        return f"k{branch.node.start}"
    left, right = map(drawn_sum, branch.children)
    return f"({left}+{right})"


def branches(branch):
    yield branch
    for child in branch.children:
        yield from branches(child)


@pytest.mark.parametrize("leaves", range(1, 17))
def test_the_picture_adds_as_ranks_do_that_hand_over_their_nodes(leaves):
    for ranks in range(1, leaves + 1):
        facts = explain_tree(micro_batches=leaves, ranks=ranks)
        handed_over = []
        for holder in facts.holders:
            stack = TreeStack(leaves, lambda left, right: f"({left}+{right})")
            for k in range(holder.start, holder.stop):
                stack.push_leaf(k, f"k{k}")
            held = stack.take()
            assert tuple(held) == holder.nodes
            handed_over += held.items()
        total = fold(handed_over, leaves, lambda left, right: f"({left}+{right})")
        assert drawn_sum(facts.root) == total
        assert facts.sum == (total[1:-1] if leaves > 1 else "")


def test_a_branch_belongs_to_the_rank_that_has_all_its_micro_batches():
    for leaves, ranks in SMALL:
        facts = explain_tree(micro_batches=leaves, ranks=ranks)
        for branch in branches(facts.root):
            owners = [h.rank for h in facts.holders if h.start <= branch.node.start and branch.node.stop <= h.stop]
            assert branch.rank == (owners[0] if owners else None)
            assert branch.handed_over == any(branch.node in holder.nodes for holder in facts.holders)


def test_seven_of_eight_on_three_ranks():
    text = tree_text(explain_tree(micro_batches=8, leaves=7, ranks=3)).splitlines()
    assert text[2:15] == [
        "rank 0  k0 ---+",
        "              +- [k0..k1] -+",
        "        k1 ---+            |",
        "                           +- k0..k3 ---+",
        "        [k2] -+            |            |",
        "              +- k2..k3 ---+            |",
        "rank 1  [k3] -+                         +- k0..k6",
        "                                        |",
        "        [k4] -+                         |",
        "              +- k4..k5 ---+            |",
        "rank 2  [k5] -+            +- k4..k6 ---+",
        "                           |",
        "        [k6] --------------+",
    ]
    assert "sum = ((k0+k1)+(k2+k3))+((k4+k5)+k6)" in text


def test_ranks_without_a_micro_batch_are_named():
    text = tree_text(explain_tree(micro_batches=6, leaves=2, ranks=4))
    assert "rank 3  none in this step  0                nothing, and joins every exchange" in text


@pytest.mark.parametrize("leaves, ranks", [(33, 7), (96, 5), (1000, 300), (1 << 20, 4096)])
def test_a_large_tree_fits_the_terminal_and_says_what_is_left_out(leaves, ranks):
    facts = explain_tree(micro_batches=leaves, ranks=ranks)
    text = tree_text(facts)
    assert max(map(len, text.splitlines())) <= 100
    assert "Left out: what is added below the nodes on the left" in text
    rows = [row.node for row in facts.root.rows()]
    assert [row.start for row in rows] == [0, *(row.stop for row in rows[:-1])]
    assert rows[-1].stop == leaves
    assert len(rows) <= 32
    assert tree_svg(facts).count("<rect") == 1 + sum(1 for _ in branches(facts.root))


def test_the_json_holds_the_nodes_that_are_handed_over():
    found = explain_tree(micro_batches=8, leaves=7, ranks=3).as_json()
    assert [holder["nodes"] for holder in found["holders"]] == [
        [[0, 2], [2, 3]],
        [[3, 4], [4, 5]],
        [[5, 6], [6, 7]],
    ]
    assert found["tree"]["node"] == [0, 7]
    assert found["most_nodes"] == 2
    assert Node(*found["tree"]["adds"][0]["node"]) == Node(0, 4)


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({"leaves": 9}, "--leaves=9 does not fit --micro-batches=8"),
        ({"leaves": 0}, "Use 1 to 8"),
        ({"ranks": 9, "micro_batches": 8}, "cannot share micro_batches=8"),
        ({"micro_batches": 1 << 21}, "Use at most 1048576"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, said):
    with pytest.raises(ConfigError, match=said):
        explain_tree(**numbers)
