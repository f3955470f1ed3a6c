"""What times between ranks mean."""

import pytest

from lockstep.doctor.host import Grade
from lockstep.doctor.torch_checks import LARGE, judge_links

ONE_HOST = {"hosts": ["fa", "fa", "fa"]}
FAST, SLOW = 2 * LARGE / 10e9, 2 * LARGE / 1e9


def test_equal_pairs_are_fine_and_the_slowest_is_named():
    found = {
        "latency": 50e-6,
        "large": 2e-3,
        "pairs": [[0, 1, FAST], [0, 2, FAST * 1.1], [1, 2, FAST]],
        **ONE_HOST,
    }
    findings = judge_links(found)
    assert [each.grade for each in findings] == [Grade.OK, Grade.OK]
    assert "50 us for 8 bytes" in findings[0].found
    assert "ranks 0 and 2" in findings[1].found


@pytest.mark.fault("M5")
def test_a_pair_far_slower_than_the_others_is_a_warning_that_says_where_to_look():
    found = {"latency": 50e-6, "large": 2e-3, "pairs": [[0, 1, FAST], [0, 2, FAST], [1, 2, SLOW]], **ONE_HOST}
    finding = judge_links(found)[1]
    assert finding.grade is Grade.WARNING
    assert "ranks 1 and 2, 1 GB/s" in finding.found
    assert "10 GB/s" in finding.advice


def test_the_bandwidth_of_an_all_reduce_counts_what_a_ring_moves():
    found = {"latency": 1e-3, "large": 2 * 3 / 4 * LARGE / 5e9, "pairs": [[0, 1, FAST]], "hosts": ["fa"] * 4}
    assert "5 GB/s for 8 MiB" in judge_links(found)[0].found


def test_ranks_of_several_hosts_are_named_with_their_hosts():
    pairs = [[0, 1, FAST], [0, 2, SLOW], [1, 2, FAST]]
    found = {"latency": 50e-6, "large": 2e-3, "pairs": pairs, "hosts": ["fa", "fa", "fb"]}
    findings = judge_links(found)
    assert findings[0].found.startswith("3 ranks on 2 hosts: ")
    assert findings[1].found.startswith("ranks 0 (fa) and 2 (fb), 1 GB/s")


def test_one_rank_has_nobody_to_exchange_with():
    findings = judge_links({"latency": 0.0, "large": 0.0, "pairs": [], "hosts": ["fa"]})
    assert [each.found for each in findings] == ["one device, nothing to exchange"]
