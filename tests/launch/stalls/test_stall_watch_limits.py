"""The time that a rank may be silent."""

import math
from types import SimpleNamespace

import pytest

from lockstep.launch.stalls import stall_watch
from lockstep.launch.stalls.stall_watch import SilenceLimit
from lockstep.runtime.heartbeat import Beat, Membership


def beat(time, step=1, phase="backward", warm=True, membership=Membership.JOINED):
    return Beat(
        phase=phase,
        epoch=0,
        step=step,
        micro_batch=0,
        time=time,
        pid=1,
        membership=membership,
        samples=(),
        warm=warm,
    )


def test_the_floor_holds_until_enough_steps_are_known():
    stall_watch = SilenceLimit(10.0)
    for step in range(20):
        stall_watch.update(beat(5.0 * step, step))
    assert stall_watch.limit(beat(95.0)) == 10.0
    stall_watch.update(beat(100.0, 20))
    assert stall_watch.limit(beat(100.0)) == 25.0


@pytest.mark.fault("K10")
def test_the_first_step_and_slow_phases_may_last_ten_times_as_long():
    stall_watch = SilenceLimit(10.0)
    assert stall_watch.limit(beat(0.0, warm=False)) == 100.0
    assert stall_watch.limit(beat(0.0, phase="save")) == 100.0
    assert stall_watch.limit(beat(0.0)) == 10.0


def test_slow_phases_and_the_first_step_teach_nothing():
    stall_watch = SilenceLimit(1.0)
    stall_watch.update(beat(0.0, 0, warm=False))
    for step in range(1, 30):
        stall_watch.update(beat(50.0 + step * 0.1, step))
    stall_watch.update(beat(53.0, 29, phase="evaluate"))
    stall_watch.update(beat(400.0, 29))
    assert stall_watch.limit(beat(400.0)) == 1.0


def test_the_end_and_a_floor_of_zero_have_no_limit():
    assert math.isinf(SilenceLimit(10.0).limit(beat(0.0, phase="end")))
    assert math.isinf(SilenceLimit(10.0).limit(beat(0.0, membership=Membership.FINISHED)))
    assert math.isinf(SilenceLimit(0.0).limit(beat(0.0)))


def test_a_rank_that_moves_without_writing_the_time_is_not_silent(monkeypatch):
    now = iter([100.0, 100.5, 101.0, 109.0])
    monkeypatch.setattr(stall_watch, "time", SimpleNamespace(monotonic=lambda: next(now)))
    rank, begun = SilenceLimit(10.0), beat(70.0)
    rank.update(begun)
    assert rank.silence(begun) == 30.0
    moved = beat(70.0, phase="reduce")
    rank.update(moved)
    assert rank.silence(moved) == 0.5
    rank.update(moved)
    assert rank.silence(moved) == 8.5
