"""Sums through shared memory, on real ranks: timeouts, and what is left of the memory."""

import pytest
from tests.ranks import run_ranks
from tests.reduce.exchanges import leave_out, traces

pytestmark = pytest.mark.shared_memory


@pytest.mark.parametrize("absent", [[1], [0, 2]])
def test_a_rank_that_does_not_come_is_named(absent):
    said = run_ranks(leave_out, 4, absent, 0.5)
    for rank, message in enumerate(said):
        if rank not in absent:
            assert f"Rank {rank} timed out after" in message and f"Missing ranks: {absent}" in message


def test_shared_memory_has_no_name_and_is_inherited_by_no_program():
    assert run_ranks(traces, 3, "shared") == [([], [], True)] * 3
