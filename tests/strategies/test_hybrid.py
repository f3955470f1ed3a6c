"""The rows of a rank in a bucket of several parameters."""

import pytest

from lockstep.strategies.hybrid import _pieces

MEMBERS = ((5, 3), (2,), (1, 4, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_of_a_bucket_is_held_by_one_rank(ranks):
    pieces = [piece for rank in range(ranks) for piece in _pieces(MEMBERS, ranks, rank)]
    held = [number for piece in pieces for number in range(piece.start, piece.stop)]
    assert sorted(held) == list(range(15 + 2 + 8))
    assert len(held) == len(set(held))


def test_a_rank_holds_consecutive_rows_of_each_parameter():
    assert list(_pieces(MEMBERS, 2, 1)) == [slice(9, 15), slice(16, 17), slice(25, 25)]
