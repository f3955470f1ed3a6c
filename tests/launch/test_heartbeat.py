import os
import time
import timeit

import numpy as np
import pytest

from lockstep.data.batch import MicroBatch
from lockstep.launch.beat import BACKWARD, FORWARD, PHASES, Membership, heartbeat_file, read_beat
from lockstep.launch.control import Control, Stopped, StopReason
from lockstep.launch.heartbeat import Heartbeat
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
    assert read_beat(tmp_path, 3).samples == tuple(range(501))


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
    """What is between two passes does not count."""
    now = iter(float(second) for second in range(100))
    monkeypatch.setattr("lockstep.launch.heartbeat.monotonic", lambda: next(now))
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data", step=4)
    assert heartbeat.passes(4, micro_batches([2, 2, 2])) is None, "the first step may compile"
    for micro_batch, phase in ((0, "backward"), (1, "forward")):
        heartbeat.mark(phase, step=4, micro_batch=micro_batch)
    heartbeat.mark(between, step=4)
    heartbeat.mark("forward", step=4, micro_batch=2)
    heartbeat.mark("backward", step=4, micro_batch=2)
    heartbeat.mark("data", step=5)
    beat = read_beat(tmp_path, 3)
    assert beat.work == (3 + 2) / 3
    assert beat.waited == (1.0 if between == "reduce" else 0.0)
    assert beat.warm


def micro_batches(sizes, first=0, stride=1):
    """Micro-batches whose samples are 100 k, 100 k + 1, ..."""
    numbers = range(first, first + stride * len(sizes), stride)
    return [MicroBatch(k, np.arange(100 * k, 100 * k + size), None) for k, size in zip(numbers, sizes)]


@pytest.fixture
def steps(world, monkeypatch):
    """A rank that has done step 4 with two micro-batches, each within so many seconds, and begun step 5."""

    def run(seconds):
        now = iter([0.0, 2 * seconds])
        monkeypatch.setattr("lockstep.launch.heartbeat.monotonic", lambda: next(now))
        heartbeat = Heartbeat.open(world)
        heartbeat.mark("data", step=4)
        heartbeat.passes(4, micro_batches([2, 2]))
        heartbeat.mark("data", epoch=1, step=5)
        return heartbeat

    return run


@pytest.mark.parametrize(("first", "stride"), [(0, 1), (4, 1), (1, 2)])
def test_of_short_micro_batches_only_the_pass_is_stored(steps, tmp_path, first, stride):
    mine = micro_batches([3, 3, 2], first, stride)
    passes = steps(0.001).passes(5, mine)
    for each in mine:
        for code, phase in ((FORWARD, "forward"), (BACKWARD, "backward")):
            passes[0] = 2 * each.k + code
            beat = read_beat(tmp_path, 3)
            assert (beat.phase, beat.epoch, beat.step, beat.micro_batch) == (phase, 1, 5, each.k)
            assert beat.samples == tuple(each.indices)


def test_the_next_mark_ends_the_passes(steps, tmp_path, monkeypatch):
    heartbeat = steps(0.001)
    heartbeat.passes(5, micro_batches([3]))[0] = FORWARD
    monkeypatch.setattr("lockstep.launch.heartbeat.monotonic", lambda: 1.0)
    heartbeat.mark("reduce", epoch=1, step=5)
    beat = read_beat(tmp_path, 3)
    assert (beat.phase, beat.micro_batch, beat.time) == ("reduce", -1, 1.0)


def test_of_one_micro_batch_and_of_none_the_pass_is_stored_too(steps, tmp_path):
    heartbeat = steps(0.001)
    assert heartbeat.passes(5, []) is not None
    heartbeat.passes(5, micro_batches([3], first=7))[0] = 2 * 7 + BACKWARD
    assert read_beat(tmp_path, 3).samples == (700, 701, 702)


def test_of_large_micro_batches_the_first_samples_are_kept_of_each(steps, tmp_path):
    mine = micro_batches([300, 300, 40])
    steps(0.001).passes(5, mine)[0] = 2 * 1 + FORWARD
    assert read_beat(tmp_path, 3).samples == tuple(range(100, 100 + 501 // 3))


def test_passes_are_marked_where_a_store_would_tell_too_little(steps):
    short = micro_batches([3, 3])
    assert steps(0.03).passes(5, short) is None, "the time must be written too"
    assert steps(0.001).passes(6, short) is None, "another step than the one marked"
    assert steps(0.001).passes(5, micro_batches([2, 3, 3])) is None, "samples were left out"
    heard = steps(0.001)
    heard.mark = heard.mark
    assert heard.passes(5, short) is None, "someone listens"


def test_indices_that_are_a_view_are_noted_too(world, tmp_path):
    heartbeat = Heartbeat.open(world)
    heartbeat.mark("data")
    heartbeat.samples(np.arange(10)[::-3])
    assert read_beat(tmp_path, 3).samples == (9, 6, 3, 0)
