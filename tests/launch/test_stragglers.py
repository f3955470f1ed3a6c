"""A rank that works longer than the others is named; one that only waits, or has more to do, is not."""

from pathlib import Path

import pytest
from tests.launch.command import wait_until

from lockstep.launch.stragglers import SlowRanks, StepWindow
from lockstep.runtime.heartbeat import StepTimer


@pytest.fixture
def take():
    """Takes a window, given the seconds of work of each rank on a micro-batch."""
    ranks = SlowRanks()
    return lambda *work: ranks.take(
        {rank: StepWindow(work=each, waited=0.0, step=1.0) for rank, each in enumerate(work)}
    )


@pytest.mark.fault("P11")
def test_a_rank_that_is_slow_in_two_windows_is_named_once(take):
    assert take(0.010, 0.020, 0.011) == ""
    assert take() == "", "the next window lasts"
    said = take(0.010, 0.020, 0.011)
    assert said.startswith(
        "lockstep: rank 1 is slow: it works 20.0 ms on a micro-batch, data included, the others 10.5 ms"
    )
    assert said.count("\n") == 1
    assert take(0.010, 0.020, 0.011) == ""


def test_ranks_that_differ_by_less_than_half_are_left_alone(take):
    assert [take(0.010, 0.014) for _ in range(5)] == [""] * 5


def test_a_difference_below_a_millisecond_is_noise(take):
    assert [take(0.0001, 0.0010) for _ in range(5)] == [""] * 5


def test_one_slow_window_is_no_slow_rank(take):
    assert [take(0.010, slow) for slow in (0.02, 0.01, 0.02, 0.01)] == [""] * 4


def test_a_rank_that_does_nothing_is_compared_with_nobody(take):
    """As a parameter server, or a rank without a micro-batch."""
    assert [take(0.0, 0.02, 0.02) for _ in range(4)] == [""] * 4


def test_one_rank_alone_is_never_slow(take):
    assert [take(0.5) for _ in range(4)] == [""] * 4


def test_other_ranks_than_before_begin_anew(take):
    assert [take(0.010, 0.020), take(0.010, 0.020, 0.010), take(0.010, 0.020)] == [""] * 3


@pytest.mark.slow
@pytest.mark.fault("P11")
def test_a_rank_with_a_slow_disk_is_named_and_the_run_goes_on(command):
    script = Path(__file__).with_name("slow_loop.py")
    command.start(script, command.marks / "end", 2)
    wait_until(lambda: "\n" in command.stderr, 120, "the line about the slow rank")
    (command.marks / "end").touch()
    code, lines = command.end()
    assert code == 0
    assert len(lines) == 1
    assert lines[0].startswith("lockstep: rank 2 is slow: ")
    command.wait_until_nothing_runs()


def run_step(meter, step, begin, micro_batches, each=0.5, wait=2.0):
    """One step of a rank: the moment after it."""
    now = begin
    for _ in range(micro_batches):
        meter.enter("forward", step, now)
        meter.micro_batches += 1
        meter.enter("backward", step, now + each / 2)
        now += each
    meter.enter("reduce", step, now)
    meter.enter("update", step, now + wait)
    return now + wait


def test_what_a_rank_waits_for_others_and_how_many_micro_batches_it_has_do_not_count():
    totals = []
    for micro_batches, wait in ((3, 0.1), (2, 0.6)):
        meter, now = StepTimer(), 0.0
        for step in range(4):
            now = run_step(meter, step, now, micro_batches, wait=wait)
        totals.append(meter.enter("data", 4, now))
        assert meter.waited == pytest.approx(4 * wait)
    assert totals == pytest.approx([4 * 0.5, 4 * 0.5])


def test_what_a_parameter_server_does_is_no_work_on_micro_batches(take):
    """A server was named as slow: it updates all keys, has no micro-batch, and waits for the workers."""
    work = {}
    for rank, micro_batches in enumerate((4, 4, 0)):
        meter, now = StepTimer(), 0.0
        for step in range(20):
            meter.enter("data", step, now)
            now = run_step(meter, step, now + 0.01, micro_batches, wait=0.5) + (0 if micro_batches else 3.0)
        work[rank] = meter.enter("data", 20, now) / 20
    assert work == pytest.approx({0: 0.5025, 1: 0.5025, 2: 0.0})
    assert [take(*work.values()) for _ in range(4)] == [""] * 4


def test_saving_and_evaluating_are_no_work_on_a_step():
    meter = StepTimer()
    now = run_step(meter, 0, 0.0, 1)
    meter.enter("evaluate", 0, now)
    meter.enter("save", 0, now + 50)
    meter.enter("data", 1, now + 99)
    assert meter.seconds == pytest.approx(0.5)
