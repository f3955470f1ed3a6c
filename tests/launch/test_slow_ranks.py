"""A rank that works longer than the others is named; one that only waits, or has more to do, is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.launch import slow_ranks
from lockstep.launch.heartbeat import Beat, Membership
from lockstep.launch.slow_ranks import SECONDS, STEPS, SlowRanks
from lockstep.launch.work_meter import WorkMeter

BEAT = Beat(
    phase="forward", epoch=0, step=0, micro_batch=0, time=0.0, pid=1, membership=Membership.JOINED, samples=()
)


def after(windows, work):
    """A rank's heartbeat after so many windows, with seconds of work for each step."""
    steps = windows * STEPS
    return replace(BEAT, step=steps, time=windows * SECONDS, work=steps * work)


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Lets the slow ranks of some heartbeats be found."""
    ranks, now = SlowRanks(tmp_path), {}
    monkeypatch.setattr(slow_ranks, "read_beat", lambda directory, rank: now.get(rank))

    def looked(*beats):
        now.update(enumerate(beats))
        return ranks.look(dict.fromkeys(range(len(beats)), 1))

    return looked


@pytest.mark.fault("P11")
def test_a_rank_that_is_slow_in_two_windows_is_named_once(look):
    for windows in range(2):
        assert look(*(after(windows, work) for work in (0.010, 0.020, 0.011))) == ""
    said = look(*(after(2, work) for work in (0.010, 0.020, 0.011)))
    assert said.startswith(
        "lockstep: rank 1 is slow: it works 20.0 ms on a micro-batch, data included, the others 10.5 ms"
    )
    assert said.count("\n") == 1
    assert look(*(after(3, work) for work in (0.010, 0.020, 0.011))) == ""


def test_ranks_that_differ_by_less_than_half_are_left_alone(look):
    assert [look(after(n, 0.010), after(n, 0.014)) for n in range(5)] == [""] * 5


def test_a_difference_below_a_millisecond_is_noise(look):
    assert [look(after(n, 0.0001), after(n, 0.0010)) for n in range(5)] == [""] * 5


def test_one_slow_window_is_no_slow_rank(look):
    work = 0.0
    for windows, seconds in enumerate((0.02, 0.02, 0.01, 0.02, 0.01)):
        work += seconds * STEPS if windows else 0.0
        slow = replace(after(windows, 0.0), work=work)
        assert look(after(windows, 0.010), slow) == ""


def test_a_rank_that_does_nothing_is_compared_with_nobody(look):
    """As a parameter server, or a rank without a micro-batch."""
    assert [look(after(n, 0.0), after(n, 0.02), after(n, 0.02)) for n in range(4)] == [""] * 4


def test_a_window_is_not_over_before_its_steps_and_its_seconds_are(look):
    look(after(0, 0.0), after(0, 0.0))
    few_steps = [replace(BEAT, step=STEPS - 1, time=10 * SECONDS, work=work) for work in (1.0, 9.0)]
    few_seconds = [replace(BEAT, step=STEPS * 9, time=SECONDS - 1, work=work) for work in (1.0, 9.0)]
    assert [look(*few_steps), look(*few_seconds), look(*few_seconds)] == [""] * 3


def test_one_rank_alone_is_never_slow(look):
    assert [look(after(n, 0.5)) for n in range(4)] == [""] * 4


@pytest.mark.slow
@pytest.mark.fault("P11")
def test_a_rank_with_a_slow_disk_is_named_and_the_run_goes_on(command):
    script = Path(__file__).with_name("slow_loop.py")
    code, lines = command.start(script, 3 * SECONDS + 4, 2).end()
    assert code == 0
    assert len(lines) == 1
    assert lines[0].startswith("lockstep: rank 2 is slow: ")
    command.wait_until_nothing_runs()


def run_step(meter, step, begin, micro_batches, each=0.5, wait=2.0):
    """One step of a rank: the moment after it."""
    now = begin
    for _ in range(micro_batches):
        meter.enter("forward", step, now)
        meter.enter("backward", step, now + each / 2)
        now += each
    meter.enter("reduce", step, now)
    meter.enter("update", step, now + wait)
    return now + wait


def test_what_a_rank_waits_for_others_and_how_many_micro_batches_it_has_do_not_count():
    totals = []
    for micro_batches, wait in ((3, 0.1), (2, 0.6)):
        meter, now = WorkMeter(), 0.0
        for step in range(4):
            now = run_step(meter, step, now, micro_batches, wait=wait)
        totals.append(meter.enter("data", 4, now))
    assert totals == pytest.approx([4 * 0.5, 4 * 0.5])


def test_saving_and_evaluating_are_no_work_on_a_step():
    meter = WorkMeter()
    now = run_step(meter, 0, 0.0, 1)
    meter.enter("evaluate", 0, now)
    meter.enter("save", 0, now + 50)
    meter.enter("data", 1, now + 99)
    assert meter.seconds == pytest.approx(0.5)
