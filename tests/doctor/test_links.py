"""What times between ranks mean."""

import pytest

from lockstep.doctor.finding import Grade
from lockstep.doctor.links import LARGE, judge_links

FAST, SLOW = 2 * LARGE / 10e9, 2 * LARGE / 1e9


def test_equal_pairs_are_fine_and_the_slowest_is_named():
    found = {"latency": 50e-6, "large": 2e-3, "pairs": [[0, 1, FAST], [0, 2, FAST * 1.1], [1, 2, FAST]]}
    findings = judge_links(found, 3)
    assert [each.grade for each in findings] == [Grade.OK, Grade.OK]
    assert "50 us for 8 bytes" in findings[0].found
    assert "ranks 0 and 2" in findings[1].found


@pytest.mark.fault("M5")
def test_a_pair_far_slower_than_the_others_is_a_warning_that_says_where_to_look():
    found = {"latency": 50e-6, "large": 2e-3, "pairs": [[0, 1, FAST], [0, 2, FAST], [1, 2, SLOW]]}
    finding = judge_links(found, 3)[1]
    assert finding.grade is Grade.WARNING
    assert "ranks 1 and 2, 1.00 GB/s" in finding.found
    assert "10.00 GB/s" in finding.advice


def test_the_bandwidth_of_an_all_reduce_counts_what_a_ring_moves():
    found = {"latency": 1e-3, "large": 2 * 3 / 4 * LARGE / 5e9, "pairs": [[0, 1, FAST]]}
    assert "5.00 GB/s for 8 MiB" in judge_links(found, 4)[0].found
