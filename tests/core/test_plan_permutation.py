"""A keyed order of any number of samples, one at a time, in no memory."""

import hashlib
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.plan import Permutation


def test_every_size_up_to_300_is_permuted():
    for size in range(1, 301):
        found = Permutation(size, key=size * 7)(np.arange(size))
        assert np.array_equal(np.sort(found), np.arange(size)), size


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 100_003])
def test_sizes_around_a_power_of_four_are_permuted(size):
    assert np.array_equal(np.sort(Permutation(size, key=1)(np.arange(size))), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_elements_of_large_sizes_are_inside_and_distinct(size, key, start):
    first = start % size
    positions = np.arange(first, min(first + 50, size))
    found = Permutation(size, key)(positions)
    assert found.dtype == np.int64
    assert found.min() >= 0 and found.max() < size
    assert len(np.unique(found)) == len(positions)


def test_the_order_of_ten_is_what_it_was():
    """Golden values: another order would change every run that was ever recorded."""
    assert Permutation(10, key=0)(np.arange(10)).tolist() == GOLDEN_TEN
    assert Permutation(10**9, key=123)([0, 1, 999_999_999]).tolist() == GOLDEN_BILLION


def test_the_orders_of_small_sizes_are_what_they_were():
    orders = hashlib.sha256()
    for size in range(1, 101):
        for key in (0, 1, 2**64 - 1):
            orders.update(Permutation(size, key)(np.arange(size)).astype("<i8").tobytes())
    assert orders.hexdigest() == "d172098c98b9b6b4e4a817ba4a8766b005d2b5159ce95678f988e5f42fe20aa2"


def test_a_part_of_the_order_is_the_same_as_in_the_whole():
    order = Permutation(1000, key=5)
    whole = order(np.arange(1000))
    assert np.array_equal(order(np.arange(300, 310)), whole[300:310])
    assert np.array_equal(order([[7, 3], [1, 999]]), whole[[[7, 3], [1, 999]]])


def test_keys_give_unrelated_orders():
    orders = [Permutation(500, key)(np.arange(500)) for key in (0, 1, 2, 2**63, 2**64 - 1)]
    for one in range(len(orders)):
        for other in range(one):
            assert np.mean(orders[one] == orders[other]) < 0.02


def test_an_order_shows_no_trend():
    """Positions and elements are as good as uncorrelated, and elements are spread over every tenth of the range."""
    order = Permutation(10_000, key=9)(np.arange(10_000))
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
    counts = np.bincount(order[:1000] // 1000, minlength=10)
    assert counts.min() > 60 and counts.max() < 145
    assert abs(np.mean(np.diff(order) > 0) - 0.5) < 0.02


def test_a_step_over_a_billion_samples_takes_under_a_millisecond_and_little_memory():
    order = Permutation(10**9, key=3)
    order(np.arange(256))
    best = min(measured(order) for _ in range(20))
    assert best < 1e-3
    tracemalloc.start()
    order(np.arange(256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_permutation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one element, got 0"):
        Permutation(0, key=1)


def measured(order):
    begin = time.perf_counter()
    order(np.arange(500_000_000, 500_000_256))
    return time.perf_counter() - begin


GOLDEN_TEN = [7, 5, 1, 8, 6, 3, 4, 0, 9, 2]
GOLDEN_BILLION = [74949556, 178545994, 187005649]


@pytest.mark.parametrize("size", [1, 2, 5, 17, 300, 1437, 4095, 4097])
def test_a_whole_order_that_is_looked_up_is_the_one_that_is_walked(size):
    """Many positions of a small domain go through a table; single ones are walked. Other keys, other outer cycles."""
    for key in range(20):
        order = Permutation(size, key)
        whole, some = order(np.arange(size)), range(0, size, max(1, size // 7))
        assert [int(order(position)[0]) for position in some] == whole[list(some)].tolist()
