"""The backend's own all-reduce, on real ranks."""

import pytest
from tests.ranks import run_ranks
from tests.reduce.exchanges import reduce_steps


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_is_within_the_error_of_any_order(world_size):
    leaves = [world_size, 1, 8, 5]
    assert run_ranks(reduce_steps, world_size, "ring", leaves, 8) == [[]] * world_size
