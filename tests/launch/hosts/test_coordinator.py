"""A run on several hosts that stands still: who is heard before it is judged, and what stops counting."""

from dataclasses import replace

import pytest
from tests.launch.hosts.test_outcome_messages import SNAPSHOT

from lockstep.core.world import World
from lockstep.launch.hosts.coordinator import SharedStall
from lockstep.launch.hosts.outcome import snapshot_to_json
from lockstep.launch.stalls import Stall
from lockstep.launch.stalls.report import StallKind, StallVerdict
from lockstep.launch.stalls.snapshot import Frame
from lockstep.runtime.heartbeat import Heartbeat, read_beat

WAITING = (
    Frame("torch/distributed/distributed_c10d.py", 1, "all_reduce"),
    Frame("/home/me/train.py", 40, "main"),
)
ASLEEP = (Frame("/home/me/train.py", 12, "load"),)


def snapshot(rank, stack, silence=61.0):
    return replace(SNAPSHOT, rank=rank, stack=stack, workers=(), collectives=(), silence=silence, limit=60.0)


@pytest.fixture
def heartbeat(tmp_path):
    world = World(rank=0, world_size=2, rendezvous="env://", run_directory=str(tmp_path), local_world_size=1)
    beat = Heartbeat.open(world)
    beat.mark("reduce", epoch=0, step=7)
    return beat


@pytest.fixture
def stall(tmp_path, heartbeat):
    """Of a host whose rank 0 waits."""
    made = SharedStall(tmp_path, tmp_path)
    seen = replace(snapshot(0, WAITING), beat=read_beat(tmp_path, 0))
    made.set(Stall(StallVerdict(StallKind.NETWORK), (seen,)), lasts=30.0)
    return made


def other(*snapshots, done=False):
    return {"snapshots": [snapshot_to_json(each) for each in snapshots], "done": done}, 0.0


def test_the_missing_rank_is_named_though_it_is_on_another_host(stall, tmp_path):
    stall.judge([other(snapshot(1, ASLEEP))], is_done=False)
    assert "the others wait for rank 1" in stall.lines[0]
    assert "/home/me/train.py:12, in load" in stall.lines[0]
    assert (tmp_path / "stall.json").is_file()


def test_nothing_is_judged_before_every_host_has_spoken(stall):
    stall.judge([other(snapshot(1, ASLEEP)), other()], is_done=False)
    assert stall.lines == []


def test_a_host_without_ranks_need_not_speak(stall):
    stall.judge([other(snapshot(1, ASLEEP)), other(done=True)], is_done=False)
    assert stall.lines


def test_a_rank_that_still_has_time_is_waited_for(stall):
    stall.judge([other(snapshot(1, ASLEEP, silence=5.0))], is_done=False)
    assert stall.lines == []


def test_what_was_seen_ends_when_a_rank_goes_on(stall, heartbeat):
    stall.expire()
    assert stall.to_json()
    heartbeat.mark("forward", epoch=0, step=8)
    stall.expire()
    assert stall.to_json() == []


def test_what_was_seen_ends_with_its_time(stall):
    stall.set(Stall(StallVerdict(StallKind.NETWORK), ()), lasts=0.0)
    stall.expire()
    stall.judge([other(snapshot(1, ASLEEP))], is_done=False)
    assert stall.lines == []
