import os
import random
import time
import timeit

import numpy as np
import pytest

from lockstep.core.world import World
from lockstep.runtime import Callback
from lockstep.runtime.control import Control, Stopped, StopReason
from lockstep.runtime.events import StepEvents
from lockstep.runtime.heartbeat import (
    BACKWARD,
    FORWARD,
    INDICES,
    MEMBERSHIP,
    PACKED_PHASE,
    PHASES,
    REDUCE,
    UPDATE,
    Heartbeat,
    Membership,
    heartbeat_file,
    read_beat,
)


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
    assert beat.position == "step 812, backward"
    assert beat.membership is Membership.OUTSIDE


def test_outside_of_a_step_only_the_phase_is_told(world, tmp_path):
    Heartbeat.open(world).mark("load")
    assert read_beat(tmp_path, 3).position == "load"


def test_there_is_no_beat_before_the_first_and_none_in_a_torn_file(world, tmp_path):
    assert read_beat(tmp_path, 3) is None
    heartbeat_file(tmp_path, 3).touch()
    assert read_beat(tmp_path, 3) is None
    Heartbeat.open(world)
    assert read_beat(tmp_path, 3) is None


def test_more_samples_than_fit_are_cut_off(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("forward")
    heartbeat.samples(np.arange(10_000))
    assert read_beat(tmp_path, 3).samples == tuple(range(4085))


def test_membership_goes_from_outside_to_finished(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("start")
    seen = []
    for membership in (Membership.JOINED, Membership.LEAVING, Membership.FINISHED):
        heartbeat.set_membership(membership)
        seen.append(read_beat(tmp_path, 3).membership)
    assert seen == [Membership.JOINED, Membership.LEAVING, Membership.FINISHED]


def test_a_stop_that_one_asks_for_is_seen_by_all(world, tmp_path):
    control, heartbeat = Control(tmp_path), Heartbeat.open(world)
    assert heartbeat.stop_reason is StopReason.NONE
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
    assert first.stop_reason is StopReason.PREEMPTED
    assert second.stop_reason is StopReason.NONE


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


def test_a_mark_tells_the_place_the_time_and_the_process(world, tmp_path):
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
def test_the_work_of_a_step_counts_for_each_micro_batch(world, tmp_path, monkeypatch, between):
    """The time between two passes does not count."""
    now = iter(float(second) for second in range(100))
    monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", lambda: next(now))
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data", step=4)
    heartbeat.begin_step(1, 4, np.arange(6).tobytes(), 2, 3)
    for micro_batch, phase in ((0, "backward"), (1, "forward")):
        heartbeat.mark(phase, step=4, micro_batch=micro_batch)
    heartbeat.mark(between, step=4)
    heartbeat.mark("forward", step=4, micro_batch=2)
    heartbeat.mark("backward", step=4, micro_batch=2)
    heartbeat.mark("data", step=5)
    beat = read_beat(tmp_path, 3)
    assert beat.work == (3 + 2) / 3
    assert beat.waited == (1.0 if between == "reduce" else 0.0)
    assert beat.stepped == 3 + beat.waited + 2
    assert beat.warm


@pytest.fixture
def steps(world, monkeypatch):
    """A rank that has been timed in step 4, which took so many seconds, and has come to step 5."""

    def run(seconds):
        now = iter([0.0, seconds / 2, seconds, *[99.0] * 99])
        monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", lambda: next(now))
        heartbeat = Heartbeat.open(world)
        heartbeat.mark("data", step=4)
        heartbeat.begin_step(1, 4, np.arange(4).tobytes(), 2, 2)
        heartbeat.mark("reduce", step=4)
        heartbeat.mark("data", epoch=1, step=5)
        return heartbeat

    return run


def test_in_a_short_step_one_number_says_where_the_rank_is(steps, tmp_path):
    heartbeat, samples = steps(0.004), np.arange(100, 108)
    heartbeat.begin_step(1, 5, samples.tobytes(), 3, 2)
    assert read_beat(tmp_path, 3).phase == "data"
    for k in range(3):
        for number, phase in ((FORWARD, "forward"), (BACKWARD, "backward")):
            heartbeat.enter(number, k)
            beat = read_beat(tmp_path, 3)
            assert (beat.phase, beat.epoch, beat.step, beat.micro_batch) == (phase, 1, 5, k)
            assert beat.samples == tuple(samples[3 * k : 3 * k + 3])
    heartbeat.enter(FORWARD, 7)
    assert read_beat(tmp_path, 3).samples == (100, 101, 102), "a spare has the samples of micro-batch 0"
    for number, phase in ((REDUCE, "reduce"), (UPDATE, "update")):
        heartbeat.enter(number)
        beat = read_beat(tmp_path, 3)
        assert (beat.phase, beat.step, beat.micro_batch) == (phase, 5, -1)
        assert beat.samples == tuple(samples)
    heartbeat.await_data(1, 6)
    beat = read_beat(tmp_path, 3)
    assert (beat.phase, beat.step, beat.micro_batch) == ("data", 6, -1)
    assert beat.samples == (), "which they will be is not known"


def test_a_long_step_is_marked_with_time_and_samples(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.await_data(2, 7)
    assert read_beat(tmp_path, 3).phase == "data"
    heartbeat.begin_step(2, 7, np.arange(4).tobytes(), 2, 1)
    before = time.monotonic()
    heartbeat.enter(FORWARD, 1, np.array([8, 9]))
    beat = read_beat(tmp_path, 3)
    assert (beat.phase, beat.epoch, beat.step, beat.micro_batch) == ("forward", 2, 7, 1)
    assert beat.time >= before
    assert beat.samples == (8, 9)


def test_the_next_mark_ends_a_place(steps, tmp_path):
    heartbeat = steps(0.004)
    heartbeat.begin_step(1, 5, np.arange(4).tobytes(), 2, 1)
    heartbeat.enter(UPDATE)
    heartbeat.mark("evaluate", epoch=1, step=5, micro_batch=2)
    beat = read_beat(tmp_path, 3)
    assert (beat.phase, beat.micro_batch, beat.time) == ("evaluate", 2, 99.0)


def test_samples_that_do_not_fit_are_not_made_up(steps, tmp_path):
    heartbeat = steps(0.004)
    heartbeat.begin_step(1, 5, np.arange(10_000).tobytes(), 2500, 4)
    for k, known in ((0, range(2500)), (1, range(2500, 4085)), (3, ())):
        heartbeat.enter(FORWARD, k)
        assert read_beat(tmp_path, 3).samples == tuple(known)


@pytest.mark.parametrize(("seconds", "short"), [(0.001, 31), (0.004, 25), (0.04, 2), (0.06, 0), (3.0, 0)])
def test_short_steps_are_marked_every_tenth_of_a_second(steps, tmp_path, seconds, short):
    heartbeat, marked = steps(seconds), []
    for step in range(5, 50):
        heartbeat.begin_step(1, step, np.arange(4).tobytes(), 2, 1)
        before = (tmp_path / "heartbeat-003").read_bytes()[: 8 * PACKED_PHASE]
        heartbeat.enter(FORWARD, 0)
        if (tmp_path / "heartbeat-003").read_bytes()[: 8 * PACKED_PHASE] != before:
            marked.append(step)
            break
    assert marked[0] == 5 + short


class Listener(Callback):
    def __init__(self):
        self.heard = []

    def on_phase(self, phase, epoch, step, micro_batch):
        self.heard.append((phase, epoch, step, micro_batch))

    def on_samples(self, indices):
        self.heard.append(indices.tolist())


def test_whoever_listens_hears_of_every_step_and_the_others_are_short_again(world, monkeypatch):
    now = iter(0.001 * n for n in range(999))
    monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", lambda: next(now))
    events, listener = StepEvents(), Listener()
    heartbeat, handle = Heartbeat.open(world, events), events.add(listener)

    def take(step):
        heartbeat.await_data(0, step)
        heartbeat.begin_step(0, step, np.arange(2).tobytes(), 2, 1)
        heartbeat.enter(FORWARD, 0, np.array([4, 5]))
        heartbeat.enter(REDUCE)

    for step in range(20):
        take(step)
    assert len(listener.heard) == 4 * 20
    assert listener.heard[:4] == [("data", 0, 0, -1), ("forward", 0, 0, 0), [4, 5], ("reduce", 0, 0, -1)]
    handle.remove()
    read = next(now)
    take(20)
    take(21)
    assert next(now) == pytest.approx(read + 0.001), "no clock is read in a short step"
    assert len(listener.heard) == 4 * 20


def test_phases_are_told_where_no_launcher_reads_them():
    events, listener = StepEvents(), Listener()
    heartbeat = Heartbeat.open(World(), events)
    events.add(listener)
    heartbeat.mark("evaluate", epoch=1, step=2, micro_batch=3)
    assert listener.heard == [("evaluate", 1, 2, 3)]


@pytest.mark.parametrize(("worked", "counted"), [(0.006, 0.006), (0.030, 0.010)])
def test_steps_that_are_not_timed_count_as_the_quicker_of_those_beside_them(
    steps, tmp_path, monkeypatch, worked, counted
):
    heartbeat = steps(0.02)
    assert heartbeat.marked_from == 10
    before = read_beat(tmp_path, 3)
    assert (before.work, before.waited) == (0.01 / 2, 0.01)
    for step in range(5, 10):
        heartbeat.begin_step(1, step, np.arange(4).tobytes(), 2, 2)
    now = iter([200.0, 200 + worked, 200.002 + worked])
    monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", lambda: next(now))
    heartbeat.mark("data", step=10)
    heartbeat.begin_step(1, 10, np.arange(4).tobytes(), 2, 2)
    heartbeat.mark("reduce", step=10)
    heartbeat.mark("data", step=11)
    after = read_beat(tmp_path, 3)
    assert after.work - before.work == pytest.approx((worked + 5 * counted) / 2)
    assert after.waited - before.waited == pytest.approx(6 * 0.002)
    assert after.stepped - before.stepped == pytest.approx(0.002 + worked + 5 * min(0.002 + worked, 0.02))
    assert heartbeat.marked_from == 11 + int(0.1 / (worked + 0.002))


def test_indices_that_are_a_view_are_noted_too(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("forward")
    heartbeat.samples(np.arange(10)[::-3])
    assert read_beat(tmp_path, 3).samples == (9, 6, 3, 0)


@pytest.mark.fault("T6")
def test_a_heartbeat_of_any_bytes_is_one_or_none(tmp_path):
    draw = random.Random(3)
    Heartbeat.open(World(run_directory=str(tmp_path))).mark("forward", step=3)
    good = heartbeat_file(tmp_path, 0).read_bytes()
    for _ in range(100):
        content = bytearray(good)
        for place in draw.choices(range(INDICES), k=draw.randrange(1, 12)):
            content[place] = draw.randrange(256)
        heartbeat_file(tmp_path, 0).write_bytes(content)
        read_beat(tmp_path, 0)
    heartbeat_file(tmp_path, 0).write_bytes(good[:MEMBERSHIP] + b"\x63" + good[MEMBERSHIP + 1 :])
    assert read_beat(tmp_path, 0) is None
