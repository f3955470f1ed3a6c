"""Real ranks sum buckets: bit for bit the sum that is written by hand, whoever is early or late."""

import pytest
from tests.ranks import run_ranks
from tests.reduce.exchanges import bytes_of, kinds_of, reduce_steps

EXACT = ["collectives", *(pytest.param(k, marks=pytest.mark.shared_memory) for k in ("shared", "sharded"))]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("world_size", [2, 3, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_sums_are_those_of_the_tree_for_every_number_of_leaves(kind, world_size):
    most = 9
    leaves = [*range(1, most + 1), *range(most, 0, -1)]
    assert run_ranks(reduce_steps, world_size, kind, leaves, most) == [[]] * world_size


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
def test_ranks_that_are_early_or_late_disturb_no_sum(kind, world_size):
    """Each rank sleeps now and then at random, so that all kinds of overtaking happen in 60 steps."""
    leaves = [world_size, 1, 2 * world_size, world_size + 1] * 15
    assert run_ranks(reduce_steps, world_size, kind, leaves, 2 * world_size, 0.002) == [[]] * world_size


@pytest.mark.shared_memory
def test_ranks_of_one_host_share_memory_unless_they_are_told_not_to():
    for found in run_ranks(kinds_of, 2):
        assert found[:3] == ["SharedMemoryReducer", "OrderedReducer", "RingReducer"]
        assert "reduce 'orderd' is not known. Did you mean 'ordered'?" in found[3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("collectives", 2 * 3 * 16 * 4),
        ("ring", 2 * 3 * 16 * 4),
        pytest.param("sharded", 64 * 4 + 16 * 4, marks=pytest.mark.shared_memory),
    ],
)
def test_bytes_are_counted_as_the_algorithm_sends_them(kind, expected):
    """64 floats, 4 ranks with one node each: three shards of 16 out, and the own folded shard to three."""
    assert run_ranks(bytes_of, 4, kind, 4) == [expected] * 4
