"""The formulas of an exchange, against transfers counted one by one."""

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.reduce import NodeLayout
from lockstep.scale.prediction import (
    PRESETS,
    Interconnect,
    NetworkLink,
    bucket_sizes,
    exposed_seconds,
    interpolated,
    ordered_seconds,
    presets,
    ring_seconds,
    tree_nodes,
)
from lockstep.strategies.gradients import GradientTree

FAST, SLOW = NetworkLink(1e-6, 100.0), NetworkLink(1e-3, 1.0)
FLAT = Interconnect("flat", FAST, FAST, 1 << 20)
HOSTS = Interconnect("hosts", FAST, SLOW, 4)
NEVER = float("inf")


def test_a_ring_on_one_host_is_two_rounds_of_a_part_for_each():
    steps = 2 * 3
    assert ring_seconds(800.0, 4, FLAT) == pytest.approx(steps * (1e-6 + 200.0 / 100.0))


def test_a_ring_of_hosts_sends_every_byte_twice_over_the_shared_link_less_one_part():
    """8 devices on 2 hosts: reduce-scatter and gather inside, and a ring of 2 in which each device has a quarter."""
    inside = 2 * 3 * (1e-6 + 200.0 / 100.0)
    per_device = 800.0 / 4 / 2
    between = 2 * 1 * (1e-3 + 4 * per_device / 1.0)
    assert ring_seconds(800.0, 8, HOSTS) == pytest.approx(inside + between)


def test_hosts_of_one_device_are_a_ring_of_devices():
    one_each = Interconnect("one", FAST, SLOW, 1)
    assert ring_seconds(800.0, 8, one_each) == pytest.approx(14 * (1e-3 + 100.0))


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_with_one_node_per_rank_the_ordered_sum_moves_as_much_as_a_ring(ranks):
    nodes = (1, ranks)
    assert ordered_seconds(800.0, ranks, FLAT, nodes, NEVER) == pytest.approx(ring_seconds(800.0, ranks, FLAT))


def test_the_ordered_sum_counts_nodes_adds_and_what_leaves_the_host():
    found = ordered_seconds(800.0, 8, HOSTS, (2, 12), adding=50.0)
    peers = 3 * (1e-6 + 2 * 100.0 / 100.0)
    others = 4 * (1e-3 + 4 * 2 * 100.0 / 1.0)
    adds = 11 * 100.0 / 50.0
    gather = 7 * (1e-3 + 100.0 / 1.0)
    assert found == pytest.approx(peers + others + adds + gather)


@pytest.mark.parametrize(("k", "ranks"), [(8, 1), (8, 2), (8, 3), (8, 5), (11, 4), (24, 7), (64, 64)])
def test_nodes_are_those_that_reducers_exchange(k, ranks):
    holding = NodeLayout.of(k, ranks)
    assert tree_nodes(k, ranks) == (holding.slots, sum(len(nodes) for nodes in holding.ranks))


def test_buckets_are_those_that_gradients_are_cut_into():
    parameters = {f"{number}": torch.nn.Parameter(torch.zeros(1 << 16)) for number in range(110)}
    tree = GradientTree(parameters, None)
    sizes = [4 * shape.numel for shape in tree.bucket_shapes]
    assert bucket_sizes(sum(sizes)) == sizes
    assert bucket_sizes(5) == [5]


def test_backward_hides_all_but_the_last_bucket():
    assert exposed_seconds([1.0, 2.0, 3.0], hidden=0.0) == 6.0
    assert exposed_seconds([1.0, 2.0, 3.0], hidden=2.0) == 4.0
    assert exposed_seconds([1.0, 2.0, 3.0], hidden=100.0) == 3.0


def test_between_measured_sizes_time_is_a_straight_line_and_never_falls():
    points = {100: 1.0, 200: 2.0, 400: 6.0}
    assert interpolated(points, 10) == 1.0
    assert interpolated(points, 150) == 1.5
    assert interpolated(points, 200) == 2.0
    assert interpolated(points, 300) == 4.0
    assert interpolated(points, 600) == 10.0
    assert interpolated({100: 2.0, 200: 1.5}, 400) == 2.0, "noise is not a gain"
    assert interpolated({100: 2.0}, 400) == 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_more_bytes_and_more_hosts_never_take_less(name):
    by = PRESETS[name]
    for formula in (
        lambda size, ranks: ring_seconds(size, ranks, by),
        lambda size, ranks: ordered_seconds(size, ranks, by, (1, ranks), 1e10),
    ):
        times = [formula(1e8, ranks) for ranks in (8, 16, 64, 512, 4096)]
        assert times == sorted(times)
        assert formula(2e8, 64) > formula(1e8, 64)


def test_presets_are_chosen_by_name_and_a_slip_is_named():
    assert [each.name for each in presets("nvlink, ethernet10")] == ["nvlink", "ethernet10"]
    assert presets("") == list(PRESETS.values())
    with pytest.raises(ConfigError, match=r"interconnect 'nvlnk' is not known. Did you mean 'nvlink'"):
        presets("nvlnk")
