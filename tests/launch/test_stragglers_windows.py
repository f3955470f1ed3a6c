"""StepWindows of steps, from heartbeats that a test writes down."""

from dataclasses import replace

import pytest

from lockstep.launch import stragglers
from lockstep.launch.stragglers import SECONDS, STEPS, StepWindow, StepWindows
from lockstep.runtime.heartbeat import Beat, Membership

BEAT = Beat(phase="forward", epoch=0, step=0, micro_batch=0, time=0.0, pid=1, membership=Membership.JOINED, samples=())


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Lets the windows of some heartbeats, rank 0's first, be found."""
    found, now = StepWindows(tmp_path), {}
    monkeypatch.setattr(stragglers, "read_beats", lambda directory, ranks: dict(now))

    def looked(*beats):
        now.clear()
        now.update(enumerate(beats))
        return found.look(dict.fromkeys(range(len(beats)), 1))

    return looked


def test_a_window_holds_the_means_of_its_steps(look):
    """Time between steps, as for an evaluation, belongs to no step."""
    assert look(BEAT) == {}
    first = replace(BEAT, step=STEPS, time=10.0, work=4.0, waited=2.0, stepped=8.0)
    assert look(first) == {0: StepWindow(work=4.0 / STEPS, waited=2.0 / STEPS, step=8.0 / STEPS)}
    second = replace(BEAT, step=3 * STEPS, time=30.0, work=5.0, waited=6.0, stepped=14.0)
    assert look(second) == {0: StepWindow(work=0.5 / STEPS, waited=2.0 / STEPS, step=3.0 / STEPS)}


def test_a_window_is_not_over_before_its_steps_and_its_seconds_are_on_every_rank(look):
    look(BEAT, BEAT)
    long = replace(BEAT, step=STEPS * 9, time=10 * SECONDS)
    few_steps = replace(BEAT, step=STEPS - 1, time=10 * SECONDS)
    few_seconds = replace(BEAT, step=STEPS * 9, time=SECONDS - 1)
    assert [look(long, few_steps), look(few_seconds, long)] == [{}, {}]
    assert look(long, long).keys() == {0, 1}


def test_a_rank_that_ends_begins_a_new_window_for_the_others(look):
    look(BEAT, BEAT)
    assert look(replace(BEAT, step=STEPS, time=SECONDS)) == {}
