"""Messages of hosts come through JSON as they were, in the reader's time, and never grow without bound."""

import json
from dataclasses import replace

from lockstep.launch.hosts.outcome import end_from_json, end_to_json, snapshot_from_json, snapshot_to_json
from lockstep.launch.outcome import RankEnd
from lockstep.launch.stalls.snapshot import Collective, Frame, RankSnapshot
from lockstep.runtime.error_record import ErrorRecord
from lockstep.runtime.heartbeat import Beat, Membership

BEAT = Beat(
    phase="reduce",
    epoch=1,
    step=7,
    micro_batch=3,
    time=50.0,
    pid=12,
    membership=Membership.LEAVING,
    samples=(4, 5),
    warm=False,
)
RECORD = ErrorRecord(
    rank=3,
    host="fb",
    pid=12,
    phase="reduce",
    epoch=1,
    step=7,
    samples=(4, 5),
    kind="ValueError",
    message="no",
    on_purpose=False,
    traceback="all of it",
    shown="the user's part",
    time=51.0,
    exit_code=4,
)
END = RankEnd(rank=3, pid=12, code=1, time=52.0, beat=BEAT, record=RECORD)
SNAPSHOT = RankSnapshot(
    rank=3,
    pid=12,
    state="S",
    beat=BEAT,
    silence=61.0,
    limit=float("inf"),
    stack=(Frame("train.py", 12, "load"), Frame("train.py", 40, "main")),
    workers=((Frame("set.py", 3, "__getitem__"),),),
    collectives=(Collective(41, "gloo:all_reduce", ((7,), (2, 3)), ("Float", "Long"), pending=True),),
)


def through_json(value):
    return json.loads(json.dumps(value))


def test_an_end_is_read_as_it_was_in_the_time_of_the_reader():
    told = through_json(end_to_json(END, host="fb", logs="logs", last_lines=["almost", "done"]))
    found = end_from_json(told, 100.0)
    assert found == replace(
        END,
        time=152.0,
        beat=replace(BEAT, time=150.0),
        record=replace(RECORD, time=151.0, traceback=""),
        host="fb",
        logs="logs",
        last_lines=("almost", "done"),
    )


def test_an_end_without_heartbeat_and_record_is_read():
    bare = RankEnd(rank=0, pid=1, code=-9, time=1.0)
    found = end_from_json(through_json(end_to_json(bare, host="a", logs="", last_lines=[])), 0.0)
    assert found == replace(bare, host="a")


def test_a_sight_is_read_as_it_was():
    assert snapshot_from_json(through_json(snapshot_to_json(SNAPSHOT)), 100.0) == replace(
        SNAPSHOT, beat=replace(BEAT, time=150.0), limit=1e9
    )


def test_a_long_traceback_is_sent_without_its_middle():
    long = replace(END, record=replace(RECORD, shown="begin" + "x" * 10**6 + "end", message="m" * 10**6))
    told = json.dumps(end_to_json(long, host="a", logs="", last_lines=["l" * 10**6]))
    assert len(told) < 60_000
    shown = end_from_json(json.loads(told), 0.0).record.shown
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "characters are left out" in shown


def test_a_deep_stack_is_sent_without_its_end():
    deep = replace(SNAPSHOT, stack=SNAPSHOT.stack * 1000, collectives=SNAPSHOT.collectives * 1000)
    assert len(json.dumps(snapshot_to_json(deep))) < 20_000
