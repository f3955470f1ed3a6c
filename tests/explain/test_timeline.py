"""The picture of a run's timeline, as text and as a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.errors import ConfigError
from lockstep.explain.timeline import explain_timeline, timeline_svg, timeline_text
from lockstep.profile.trace import TraceSpan, events

MS = 1_000_000


def written(folder, *ranks):
    """A timeline of these ranks' spans, (lane, name, first and last millisecond)."""
    found = []
    for rank, spans in enumerate(ranks):
        made = [TraceSpan(lane, name, 50 * MS + a * MS, 50 * MS + b * MS) for lane, name, a, b in spans]
        found += events(made, rank=rank, title=f"rank {rank} (ddp, cpu)", origin=0)
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": found}))
    return folder / "timeline.json"


RANK = [
    ("step", "step 3", 0, 100),
    ("data", "wait", 0, 10),
    ("loader, worker 0", "step 3 k0", 0, 30),
    ("loader, worker 1", "step 3 k1", 20, 40),
    ("forward", "forward k0", 10, 50),
    ("in flight", "bucket 0", 60, 100),
    ("in flight", "bucket 1", 80, 100),
    ("reduce", "exchange", 90, 100),
]


def test_time_in_which_lanes_are_busy_is_counted_once(tmp_path):
    trace = explain_timeline(written(tmp_path, RANK))
    assert trace.milliseconds == 100
    (rank,) = trace.ranks
    busy = {lane.title: lane.busy for lane in rank.lanes}
    assert busy["reduce, in flight"] == 40 and busy["forward"] == 40
    assert (rank.reading, rank.hidden) == (40, 30)


def test_the_text_has_a_line_for_each_lane_and_says_what_is_hidden(tmp_path):
    lines = timeline_text(explain_timeline(written(tmp_path, RANK, RANK))).splitlines()
    assert lines[0] == "100 ms of 2 ranks" and max(map(len, lines)) <= 100
    (forward,) = {line for line in lines if line.startswith("forward")}
    assert forward.split() == ["forward", "#" * 24, "40", "%"]
    said = " ".join(lines)
    assert "It waits for data 10 % of the time." in said
    assert "Its workers read 40 % of the time, and 75 % of that is hidden behind other work." in said
    assert "Gradients are in flight 40 % of the time, and waited for 10 %." in said


def test_the_picture_has_a_box_for_each_span_and_its_name_where_there_is_room(tmp_path):
    root = ElementTree.fromstring(timeline_svg(explain_timeline(written(tmp_path, RANK))))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if "rank" in box.get("class")]
    assert len(boxes) == len(RANK)
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"step 3", "forward k0", "rank 0 (ddp, cpu)", "100 ms", "waiting for data"} <= words


def test_of_many_ranks_the_first_and_the_last_are_drawn(tmp_path):
    trace = explain_timeline(written(tmp_path, *[RANK] * 7))
    assert [rank.title.split()[1] for rank in trace.ranks] == ["0", "1", "2", "6"]
    assert "Left out: ranks 3 to 5 of 7." in timeline_text(trace)


def test_a_run_folder_is_taken_for_its_timeline(tmp_path):
    with pytest.raises(ConfigError, match=r"timeline.json': No such file .* A run with --profile writes it"):
        explain_timeline(tmp_path)
    written(tmp_path)
    with pytest.raises(ConfigError, match=r"is empty"):
        explain_timeline(tmp_path)


def test_an_empty_timeline_says_what_to_ask_for(tmp_path):
    with pytest.raises(ConfigError, match=r"is empty: .*for example with --profile 0:5"):
        explain_timeline(written(tmp_path))


@pytest.mark.parametrize("event", [{"ph": "X"}, {"ph": "X", "pid": 0, "ts": 1}, "x", {"name": 1}])
def test_a_trace_of_another_program_is_named(tmp_path, event):
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(ConfigError, match=r"other.json' is a trace of another program"):
        explain_timeline(tmp_path / "other.json")


def test_the_figure_of_the_docs_is_drawn_from_the_timeline_beside_it():
    figures = Path(__file__).parents[2] / "docs" / "figures"
    drawn = timeline_svg(explain_timeline(figures / "timeline.json"))
    assert (figures / "timeline.svg").read_text(encoding="utf-8") == drawn, "draw it anew: see docs/profile.md"
