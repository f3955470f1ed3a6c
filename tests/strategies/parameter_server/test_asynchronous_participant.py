"""The barriers that each process has reached, without a process."""

import math

from lockstep.strategies.parameter_server.asynchronous_participant import BarrierTracker


def test_all_wait_at_a_barrier_until_it_is_over():
    tracker = BarrierTracker()
    assert not tracker.all_wait([1, 2])
    tracker.arrive(1, 1)
    assert not tracker.all_wait([1, 2])
    tracker.arrive(2, 1)
    assert tracker.all_wait([1, 2])
    assert tracker.begin() == 1
    tracker.end()
    assert not tracker.all_wait([1, 2]), "the first barrier is over: they continue"
    tracker.arrive(1, 2)
    tracker.arrive(2, math.inf)
    assert tracker.all_wait([1, 2])


def test_a_worker_is_awaited_while_the_server_is_at_a_barrier_that_it_has_not_reached():
    """The picture of the module."""
    tracker = BarrierTracker()
    tracker.passed = 3
    for worker in (1, 2):
        tracker.arrive(worker, 3)
    assert [tracker.is_awaited(worker) for worker in (1, 2)] == [False, False], "the server is at none"
    tracker.begin()
    tracker.arrive(1, 4)
    assert [tracker.is_awaited(worker) for worker in (1, 2)] == [False, True]
    tracker.end()
    tracker.begin()
    assert [tracker.is_awaited(worker) for worker in (1, 2)] == [True, True], "the shutdown waits for all"
