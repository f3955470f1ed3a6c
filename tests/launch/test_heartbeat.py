import os
import time
import timeit

import numpy as np
import pytest

from lockstep.launch.heartbeat import (
    PHASES,
    Control,
    Heartbeat,
    Membership,
    Stopped,
    StopReason,
    heartbeat_file,
    read_beat,
)
from lockstep.world import World


@pytest.fixture
def world(tmp_path):
    return World(
        rank=3,
        world_size=4,
        local_rank=3,
        local_world_size=4,
        rendezvous="file:///nowhere",
        run_directory=str(tmp_path),
    )


def test_the_supervisor_reads_what_the_rank_marked(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("backward", epoch=2, step=812, micro_batch=5)
    heartbeat.samples(np.array([9, 4, 7]))
    beat = read_beat(tmp_path, 3)
    assert (beat.phase, beat.epoch, beat.step, beat.micro_batch) == ("backward", 2, 812, 5)
    assert beat.samples == (9, 4, 7)
    assert beat.place == "step 812, backward"
    assert beat.membership is Membership.OUTSIDE


def test_outside_of_a_step_only_the_phase_is_told(world, tmp_path):
    Heartbeat.open(world).mark("load")
    assert read_beat(tmp_path, 3).place == "load"


def test_there_is_no_beat_before_the_first_and_none_in_a_torn_file(world, tmp_path):
    assert read_beat(tmp_path, 3) is None
    heartbeat_file(tmp_path, 3).touch()
    assert read_beat(tmp_path, 3) is None
    Heartbeat.open(world)
    assert read_beat(tmp_path, 3) is None


def test_more_samples_than_fit_are_cut_off(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data")
    heartbeat.samples(np.arange(10_000))
    assert read_beat(tmp_path, 3).samples == tuple(range(503))


def test_membership_goes_from_outside_to_finished(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("start")
    seen = []
    for step in (heartbeat.mark_joined, heartbeat.mark_leaving, heartbeat.mark_finished):
        step()
        seen.append(read_beat(tmp_path, 3).membership)
    assert seen == [Membership.JOINED, Membership.LEAVING, Membership.FINISHED]


def test_a_stop_that_one_asks_for_is_seen_by_all(world, tmp_path):
    control, heartbeat = Control(tmp_path), Heartbeat.open(world)
    assert not heartbeat.stop_requested
    control.request_stop(StopReason.PREEMPTED)
    assert heartbeat.stop_reason is StopReason.PREEMPTED
    heartbeat.control.request_stop(StopReason.INTERRUPTED)
    control.request_stop(StopReason.PREEMPTED)
    assert control.reason is StopReason.INTERRUPTED, "an interrupt stands"


def test_the_supervisor_knows_whether_anyone_asks_for_the_flag(world, tmp_path):
    control, heartbeat = Control(tmp_path), Heartbeat.open(world)
    assert not control.polled
    heartbeat.will_poll()
    assert control.polled


def test_without_a_run_directory_nothing_is_written_and_the_flag_is_ones_own():
    first, second = Heartbeat.open(World()), Heartbeat.open(World())
    first.mark("data", step=1)
    first.samples(np.array([1]))
    first.control.request_stop(StopReason.PREEMPTED)
    assert first.stop_requested
    assert not second.stop_requested


def test_an_unknown_phase_is_refused(world):
    with pytest.raises(KeyError):
        Heartbeat.open(world).mark("thinking")


def test_stopping_exits_with_the_reasons_code():
    assert Stopped(StopReason.PREEMPTED).code == 75
    assert Stopped(StopReason.INTERRUPTED).code == 130


def test_a_mark_costs_about_a_microsecond(world):
    heartbeat = Heartbeat.open(world)
    mark = timeit.Timer(lambda: heartbeat.mark("forward", epoch=1, step=12, micro_batch=3))
    assert min(mark.repeat(7, 2000)) / 2000 < 5e-6, "five times the promise, for a busy machine"
    assert len(set(PHASES)) == len(PHASES)


def test_from_one_micro_batch_to_the_next_only_the_place_and_the_time_change(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data", epoch=2, step=7)
    for micro_batch in range(3):
        for phase in ("forward", "backward"):
            before = time.monotonic()
            heartbeat.mark(phase, epoch=2, step=7, micro_batch=micro_batch)
            beat = read_beat(tmp_path, 3)
            assert (beat.phase, beat.epoch, beat.step, beat.micro_batch) == (phase, 2, 7, micro_batch)
            assert (beat.pid, beat.warm) == (os.getpid(), False)
            assert before <= beat.time <= time.monotonic()


@pytest.mark.parametrize("between", ["reduce", "evaluate", "save"])
def test_the_work_of_a_step_is_the_same_however_it_is_written(world, tmp_path, monkeypatch, between):
    """Work counts for each micro-batch, and what is between two of them does not count."""
    now = iter(float(second) for second in range(100))
    monkeypatch.setattr("lockstep.launch.heartbeat.monotonic", lambda: next(now))
    heartbeat = Heartbeat.open(world)
    for micro_batch, phase in ((0, "forward"), (0, "backward"), (1, "forward")):
        heartbeat.mark(phase, step=4, micro_batch=micro_batch)
    heartbeat.mark(between, step=4)
    heartbeat.mark("forward", step=4, micro_batch=2)
    heartbeat.mark("backward", step=4, micro_batch=2)
    heartbeat.mark("data", step=5)
    beat = read_beat(tmp_path, 3)
    assert beat.work == (3 + 2) / 3
    assert beat.waited == (1.0 if between == "reduce" else 0.0)
    assert beat.warm


def test_indices_that_are_a_view_are_noted_too(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data")
    heartbeat.samples(np.arange(10)[::-3])
    assert read_beat(tmp_path, 3).samples == (9, 6, 3, 0)
