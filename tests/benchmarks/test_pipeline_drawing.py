"""The drawings of ``benchmarks/pipeline``: they are SVG, and show every pass, schedule and number of micro-batches."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "pipeline"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("drawing")
    del sys.modules["drawing"]


def measured(schedule, count):
    """Two ranks with ``count`` forward and backward passes each; the second rank begins one pass later."""
    spans = [
        [(f"{rank}F" if number % 2 else "B", rank + number, rank + number + 0.9) for number in range(2 * count)]
        for rank in range(2)
    ]
    return SimpleNamespace(schedule=schedule, count=count, waiting=[0.1, 0.2, 0.4], expected=0.15, spans=spans)


def shapes(picture, kind):
    return ElementTree.fromstring(picture).findall(f"{SVG}{kind}")


def words(picture):
    return [each.text for each in shapes(picture, "text")]


def test_every_pass_has_a_box_that_begins_and_ends_with_it(drawing):
    picture = drawing.timelines([measured("gpipe", 2), measured("1f1b", 4)])
    boxes = [each for each in shapes(picture, "rect") if each.get("fill") in (drawing.FORWARD, drawing.BACKWARD)]
    assert len(boxes) == 2 * (2 * 2 + 2 * 4)
    widths = [float(each.get("width")) for each in boxes]
    assert max(widths) == pytest.approx(min(widths), abs=0.2)
    assert max(float(each.get("x")) + float(each.get("width")) for each in boxes) <= drawing.WIDTH
    assert [text for text in words(picture) if "waiting" in text][:2] == [
        "gpipe, 2 micro-batches: 20 % waiting",
        "1f1b, 4 micro-batches: 20 % waiting",
    ]


def test_every_measurement_has_a_point_above_the_theory_where_it_waited_longer(drawing):
    found = [measured(schedule, count) for schedule in drawing.COLOURS for count in (2, 4, 8)]
    picture = drawing.bubbles(found, ranks=2)
    points = shapes(picture, "circle")
    assert len(points) == 9
    theory = float(re.search(r'y1="([0-9.]+)"[^/]*stroke="#4c8bd6"', picture).group(1))
    assert all(float(point.get("cy")) < theory for point in points), "up is more waiting"
    assert {"M = 2", "M = 4", "M = 8", *drawing.COLOURS} <= set(words(picture))
