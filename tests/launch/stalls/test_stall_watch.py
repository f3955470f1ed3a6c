"""When ranks are asked where they stand; with heartbeats of this process, and no other one."""

import os

import pytest

import lockstep
from lockstep.core.world import World
from lockstep.launch.stalls import stall_watch
from lockstep.launch.stalls.report import StallKind
from lockstep.launch.stalls.snapshot import Frame, RankSnapshot
from lockstep.runtime.heartbeat import Beat, Heartbeat, Membership, read_beat

WORKING = (Frame("/home/u/train.py", 12, "load"),)
WAITING = (
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 4000, "all_reduce"),
    Frame("/home/u/train.py", 30, "step"),
)
BEAT = Beat(phase="data", epoch=0, step=1, micro_batch=0, time=0.0, pid=1, membership=Membership.JOINED, samples=())


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", one.monotonic)
    monkeypatch.setattr(stall_watch, "time", one)
    monkeypatch.setattr(stall_watch, "time", one)
    return one


@pytest.fixture
def ranks(tmp_path, monkeypatch, clock):
    """Two ranks whose stacks the test sets: ``ranks.stacks[rank] = ...``."""
    beats = [
        Heartbeat.open(World(rank=n, world_size=2, rendezvous="file://x", run_directory=str(tmp_path))) for n in (0, 1)
    ]
    asked = []
    stacks = {0: WAITING, 1: WORKING}

    def take_snapshots(directory, processes, limits):
        asked.append(clock.now)
        return [
            RankSnapshot(
                rank=rank,
                pid=pid,
                state="S",
                beat=read_beat(directory, rank),
                silence=clock.now - read_beat(directory, rank).time,
                limit=limits[rank].limit(read_beat(directory, rank)),
                stack=stacks[rank],
            )
            for rank, pid in processes.items()
        ]

    monkeypatch.setattr(stall_watch, "take_snapshots", take_snapshots)
    watch = stall_watch.StallWatch(tmp_path, 10.0)

    class Ranks:
        pass

    found = Ranks()
    found.beats, found.asked, found.stacks = beats, asked, stacks
    found.look = lambda: watch.look({0: os.getpid(), 1: os.getpid()})
    return found


def step(ranks, number):
    for beat in ranks.beats:
        beat.mark("backward", epoch=0, step=number)
        beat.set_membership(Membership.JOINED)


def test_ranks_that_give_signs_of_life_are_not_asked(ranks, clock):
    for number in range(5):
        step(ranks, number)
        clock.now += 9.0
        assert ranks.look() is None
    assert ranks.asked == []


def test_a_rank_that_others_wait_for_is_a_stall_after_the_limit(ranks, clock):
    step(ranks, 0)
    step(ranks, 1)
    clock.now += 10.5
    found = ranks.look()
    assert (found.verdict.kind, found.verdict.culprits) == (StallKind.MISSING, (1,))


def test_a_rank_that_says_that_it_is_alive_has_its_time_from_then(ranks, clock):
    step(ranks, 0)
    step(ranks, 1)
    for _ in range(5):
        clock.now += 9.0
        lockstep.heartbeat()  # of rank 1, which was opened last
        assert ranks.look() is None
    clock.now += 10.5
    assert ranks.look().verdict.culprits == (1,)


def test_a_slow_run_is_mentioned_once_for_each_place(ranks, clock):
    ranks.stacks[0] = WORKING
    step(ranks, 0)
    step(ranks, 1)
    clock.now += 10.5
    assert ranks.look().verdict.kind is StallKind.BUSY
    clock.now += 10.0
    assert ranks.look() is None


@pytest.mark.parametrize("phase", ["evaluate", "prepare", "update"])
def test_ranks_that_wait_at_different_lines_are_a_stall_after_the_limit_in_slow_phases_too(ranks, clock, phase):
    for beat in ranks.beats:
        beat.mark(phase, step=0)
        beat.set_membership(Membership.JOINED)
    clock.now += 10.5
    assert ranks.look() is None, "rank 1 may take long, as for compiling"
    ranks.stacks[1] = WAITING
    clock.now += 10.5
    assert ranks.look() is None, "they may exchange much"
    ranks.stacks[1] = (WAITING[0], Frame("/home/u/train.py", 34, "step"))
    clock.now += 10.5
    found = ranks.look()
    assert (found.verdict.kind, found.verdict.culprits) == (StallKind.MISMATCH, (1,))
    assert {each.limit for each in found.snapshots} == {10.0}


def test_a_script_without_heartbeats_stands_still_only_where_it_is_seen_at_the_same_place_for_the_limit(ranks, clock):
    for beat in ranks.beats:
        beat.mark("start")
    clock.now += 10.5
    assert ranks.look() is None, "seen there for the first time"
    clock.now += 5.0
    assert ranks.look() is None
    clock.now += 6.0
    assert ranks.look().verdict.kind is StallKind.MISSING


def test_a_script_without_other_heartbeats_may_say_that_it_is_alive_too(ranks, clock):
    for beat in ranks.beats:
        beat.mark("start")
    for _ in range(4):
        clock.now += 6.0
        lockstep.heartbeat()
        assert ranks.look() is None


def test_a_script_without_heartbeats_that_nobody_waits_in_is_left_alone(ranks, clock):
    ranks.stacks[0] = WORKING
    for beat in ranks.beats:
        beat.mark("start")
    for _ in range(10):
        clock.now += 10.5
        assert ranks.look() is None


def test_a_limit_of_zero_asks_nobody(tmp_path, ranks, clock):
    step(ranks, 0)
    clock.now += 10**6
    assert stall_watch.StallWatch(tmp_path, 0.0).look({0: 1}) is None
    assert ranks.asked == []


def test_a_sight_of_a_rank_whose_worker_is_stuck_names_the_line_of_the_data_set():
    reader = Frame("/x/site-packages/lockstep/data/reader.py", 5, "read")
    snapshot = RankSnapshot(
        rank=1,
        pid=1,
        state="S",
        beat=BEAT,
        silence=9.0,
        limit=5.0,
        stack=(
            Frame("/x/anywhere.py", 90, "next [waits for a loader worker]"),
            Frame("/home/u/train.py", 16, "<module>"),
        ),
        workers=((Frame("/home/u/data.py", 77, "__getitem__"), reader),),
    )
    assert snapshot.frame == Frame("/home/u/data.py", 77, "__getitem__")


@pytest.mark.fault("T7")
def test_without_proc_a_rank_still_counts_as_one_that_can_answer(tmp_path, monkeypatch):
    assert stall_watch.process_state(2**30) == ""
    monkeypatch.setattr(stall_watch, "Path", lambda path: tmp_path / "absent")
    assert stall_watch.process_state(os.getpid()) == "?"
