"""All ranks write one file, which is a whole trace whenever one has written."""

import errno
import fcntl
import json
import multiprocessing

import pytest

from lockstep.errors import ConfigError
from lockstep.profile import trace as file

SPAN = {"name": "step 0", "ph": "X", "ts": 0.0, "dur": 5.0, "pid": 0, "tid": 1, "args": {}}


def write(folder, rank, origin):
    file.add(folder, origin, lambda shared: [{**SPAN, "pid": rank, "ts": float(origin - shared)}])


def refuse(*_):
    raise OSError(errno.ENOLCK, "no locks")


@pytest.mark.fault("T4")
@pytest.mark.parametrize("locks", [True, False])
def test_ranks_that_write_at_once_lose_nothing_and_share_one_origin(tmp_path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    file.begin(tmp_path)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=write, args=(tmp_path, rank, 1000 + rank)) for rank in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    trace = json.loads((tmp_path / file.FILE).read_text())
    assert sorted(event["pid"] for event in trace["traceEvents"]) == list(range(8))
    origin = int(trace["otherData"]["unix_nanoseconds_at_0"])
    assert {(event["pid"], event["ts"] + origin) for event in trace["traceEvents"]} == {
        (rank, 1000.0 + rank) for rank in range(8)
    }
    assert file.read(tmp_path / file.FILE) == trace["traceEvents"] == file.read(tmp_path)


def test_a_second_start_of_the_run_begins_anew(tmp_path):
    file.begin(tmp_path)
    write(tmp_path, 0, 5)
    file.begin(tmp_path)
    assert file.read(tmp_path / file.FILE) == []


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / file.FILE).mkdir()
    with pytest.raises(ConfigError, match=r"Cannot write the timeline to .*timeline.json': Is a directory"):
        file.begin(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "{}", '{"traceEvents": 3}'])
def test_what_is_no_timeline_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=r"x.json' is not a timeline. Give the timeline.json of a run"):
        file.read(tmp_path / "x.json")


def test_a_timeline_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read the timeline .*x.json': No such file"):
        file.read(tmp_path / "x.json")
