"""The bound on staleness, and the barriers that each process has reached, without a process."""

import math
import random

import pytest

from lockstep.strategies.parameter_server.asynchronous_staleness import BarrierTracker, Clock, Staleness


def test_a_worker_more_than_the_staleness_ahead_of_the_slowest_waits():
    """The picture of the module."""
    clock = Clock([1, 2, 3], staleness=2)
    for worker, steps in ((1, 9), (2, 7), (3, 6)):
        for _ in range(steps):
            clock.advance(worker)
    assert [clock.may_go_on(worker) for worker in (1, 2, 3)] == [False, True, True]
    assert clock.farthest == 9


def test_with_a_staleness_of_zero_all_keep_step():
    clock = Clock([1, 2], staleness=0, step=5)
    assert clock.advance(1) == 1
    assert not clock.may_go_on(1)
    assert clock.may_go_on(2)
    clock.advance(2)
    assert clock.may_go_on(1)
    assert clock.may_go_on(2)


def test_nobody_waits_for_a_worker_that_was_lost():
    clock = Clock([1, 2, 3], staleness=0)
    clock.advance(1)
    clock.advance(2)
    assert not clock.may_go_on(1)
    assert clock.lose(3)
    assert not clock.lose(3), "it was lost before"
    assert clock.may_go_on(1)
    assert clock.living == [1, 2]
    assert clock.lead(3) == 0


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_worker_that_obeys_is_ever_further_ahead_than_the_bound(staleness):
    """Workers in random order, each stepping only when it may; one is lost on the way."""
    chance, clock, most = random.Random(3), Clock(range(1, 5), staleness), 0
    for turn in range(2000):
        if turn == 700:
            clock.lose(2)
        worker = chance.choice(clock.living)
        if clock.may_go_on(worker):
            most = max(most, clock.advance(worker))
    assert most == staleness + 1


def test_staleness_is_counted_since_the_last_reading_and_over_the_run():
    stale = Staleness()
    assert stale.recent() == {}
    stale.add([0, 1, 2])
    assert stale.recent() == {"staleness": 1.0, "staleness_max": 2.0}
    stale.add([0])
    assert stale.recent() == {"staleness": 0.0, "staleness_max": 0.0}
    assert (stale.mean, stale.most) == (0.75, 2)


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
    """The picture of the module, of barriers."""
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
