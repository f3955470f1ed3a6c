"""The files of recorded runs."""

import json

import pytest
from tests.verify.plain.recordings import recording

from lockstep.errors import ConfigError
from lockstep.verify.plain import Recording


def write(folder, run):
    for rank in run.ranks:
        lines = [rank.header(), *(json.dumps(step, default=vars) for step in rank.steps)]
        (folder / f"rank-{rank.rank:03d}.jsonl").write_text("\n".join(lines) + "\n")


def test_what_is_read_is_what_was_written(tmp_path):
    write(tmp_path, recording(2))
    assert Recording.read(tmp_path) == Recording(list(recording(2).ranks))


def test_a_line_that_was_cut_off_is_ignored(tmp_path):
    write(tmp_path, recording(1))
    path = tmp_path / "rank-000.jsonl"
    path.write_text(path.read_text()[:-100])
    assert Recording.read(tmp_path).length == recording(1).length - 1


def test_a_rank_that_is_missing_is_named(tmp_path):
    write(tmp_path, recording(3))
    (tmp_path / "rank-001.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"holds rank 0 of 3, rank 2 of 3\. Create a Recorder on every rank"):
        Recording.read(tmp_path)
