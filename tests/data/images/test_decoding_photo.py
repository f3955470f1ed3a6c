import pytest

from lockstep.data.images.decoding import reduced, reduction


@pytest.mark.parametrize(("spare", "factor"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (100, 8)])
def test_a_photo_is_reduced_by_the_largest_scale_that_leaves_enough(spare, factor):
    assert reduction(4000, 3000, spare) == factor


def test_the_smallest_photos_are_not_reduced():
    assert reduction(7, 7, 7) == 1
    assert reduction(8, 3, 3) == 2


def test_sides_are_rounded_up():
    assert [reduced(1003, factor) for factor in (1, 2, 4, 8)] == [1003, 502, 251, 126]
