"""Shapes as SVG and PNG, legends and marks."""

import io
from xml.etree import ElementTree

import pytest

from lockstep.explain.chart import (
    Chart,
    Curve,
    Label,
    Rectangle,
    html_document,
    legend,
    png,
    svg,
    table,
    tick_step,
)

PICTURE = Chart(
    60,
    40,
    (
        Rectangle(0, 0, 10, 10, "#ff0000"),
        Curve(((20, 5), (50, 5), (50, 30)), "#0000ff"),
        Label(30, 35, "a < b", size=8),
    ),
)


def test_every_shape_is_in_the_svg():
    root = ElementTree.fromstring(svg(PICTURE))
    assert [child.tag.rpartition("}")[2] for child in root] == ["rect", "rect", "polyline", "text"]
    assert root[2].get("points") == "20,5 50,5 50,30"
    assert (root[2].get("stroke"), root[3].text) == ("#0000ff", "a < b")


def test_every_shape_is_in_the_png():
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(png(PICTURE))).convert("RGB")
    assert image.size == (120, 80)
    assert image.getpixel((4, 4)) == (255, 0, 0)
    assert image.getpixel((70, 10)) == image.getpixel((100, 40)) == (0, 0, 255)
    assert image.getpixel((70, 40)) == (255, 255, 255)


def test_a_slanting_line_of_the_png_is_smooth():
    """Its pixels were full or empty, so that a steep line was twice as thick as a flat one."""
    pixels = pytest.importorskip("PIL.Image")
    picture = Chart(40, 40, (Curve(((2, 2), (38, 25)), "#000000"),))
    image = pixels.open(io.BytesIO(png(picture))).convert("L")
    assert {value for value, count in enumerate(image.histogram()) if count} - {0, 255}


@pytest.mark.parametrize(("most", "step"), [(1.0, 0.2), (6.0, 1.0), (7.0, 2.0), (0.03, 0.005), (3600, 1000)])
def test_marks_are_round_numbers_and_at_most_six(most, step):
    assert tick_step(most) == pytest.approx(step)


def test_a_legend_takes_more_lines_where_it_does_not_fit():
    names = {f"run number {number}": "#000000" for number in range(6)}
    shapes, below = legend(names, 10, 300, 20)
    lines = {shape.y for shape in shapes if isinstance(shape, Label)}
    assert lines == {20, 40, 60}
    assert below == 80


def test_words_of_pages_and_tables_are_escaped():
    text = html_document("<b>", [table([("head",), ("<i>",)])])
    assert "<title>&lt;b&gt;</title>" in text
    assert "<th>head</th>" in text and "<td>&lt;i&gt;</td>" in text
