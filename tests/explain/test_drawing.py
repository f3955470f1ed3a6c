"""The drawings: self-contained, nothing outside the page, no words over others."""

import re
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.explain.figures import FIGURES

from lockstep.explain.drawing import Drawing, short
from lockstep.explain.pipeline import explain_pipeline, pipeline_svg
from lockstep.explain.samples import explain_samples, samples_svg
from lockstep.explain.traffic import explain_traffic, traffic_svg
from lockstep.explain.tree import explain_tree, tree_svg

LETTER = 0.605  # of the size: DejaVu Sans Mono and Menlo, the widest of those named
PICTURES = {
    **FIGURES,
    "many samples": lambda: samples_svg(
        explain_samples(samples=100_003, ranks=9, batch=8, micro_batches=36, shuffle=True)
    ),
    "large tree": lambda: tree_svg(explain_tree(micro_batches=96, ranks=5)),
    "huge tree": lambda: tree_svg(explain_tree(micro_batches=1 << 20, ranks=4096)),
    "uneven traffic": lambda: traffic_svg(explain_traffic(ranks=3, servers=2)),
    "large traffic": lambda: traffic_svg(explain_traffic(ranks=4096, servers=100, parameters=10**12)),
    "lonely traffic": lambda: traffic_svg(explain_traffic(ranks=1)),
    "large pipeline": lambda: pipeline_svg(explain_pipeline(stages=16, micro_batches=64)),
    "deep pipeline": lambda: pipeline_svg(explain_pipeline(stages=2, micro_batches=40, stages_per_rank=5)),
}


@cache
def picture(name):
    return PICTURES[name]()


def number(element, name):
    return float(element.get(name))


def elements(svg, tag):
    return ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}")


def words(svg):
    """Text and the rectangle that it takes: left, top, right, bottom."""
    for text in elements(svg, "text"):
        size = number(text, "font-size")
        width = len(text.text) * size * LETTER
        left = number(text, "x") - {None: 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        base = number(text, "y")
        yield text.text, (left, base - 0.72 * size, left + width, base + 0.1 * size)


def overlaps(ones, others):
    """Of each rectangle with each: whether they have a point in common; shape (ones, others)."""
    a, b = np.array(ones)[:, None], np.array(others)[None]
    return (a[..., :2] < b[..., 2:]).all(-1) & (b[..., :2] < a[..., 2:]).all(-1)


def boxes(svg):
    for box in elements(svg, "rect"):
        if box.get("class") != "page":
            left, top = number(box, "x"), number(box, "y")
            yield left, top, left + number(box, "width"), top + number(box, "height")


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_fetched_or_run(name):
    svg = picture(name)
    assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"url\([^)]*\)", svg)) <= {"url(#arrow)"}
    assert not {"script", "image", "use", "foreignObject", "link"} & {
        element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()
    }
    assert "@import" not in svg and "@font-face" not in svg


@pytest.mark.parametrize("name", PICTURES)
def test_every_style_has_a_look_in_light_and_in_dark(name):
    light, _, dark = picture(name).partition("@media (prefers-color-scheme:dark)")
    dark = dark.partition("</style>")[0]
    used = {each.get("class") for tag in ("rect", "polyline") for each in elements(picture(name), tag)}
    for style in used:
        assert re.search(rf"\.{style}[,{{]", light), style
        assert re.search(rf"\.{style}[,{{]", dark), style


@pytest.mark.parametrize("name", PICTURES)
def test_everything_is_on_the_page(name):
    left, top, width, height = map(float, ElementTree.fromstring(picture(name)).get("viewBox").split())
    for text, place in words(picture(name)):
        assert left <= place[0] and place[2] <= left + width, text
        assert top <= place[1] and place[3] <= top + height, text
    for box in elements(picture(name), "rect"):
        assert number(box, "x") + number(box, "width") <= left + width + 0.2
        assert number(box, "y") + number(box, "height") <= top + height + 0.2


@pytest.mark.parametrize("name", PICTURES)
def test_no_words_lie_over_others(name):
    texts, places = zip(*words(picture(name)))
    found = np.argwhere(np.triu(overlaps(places, places), 1))
    assert not [(texts[a], texts[b]) for a, b in found]


@pytest.mark.parametrize("name", PICTURES)
def test_words_that_begin_in_a_box_end_in_it(name):
    texts, places = zip(*words(picture(name)))
    around = list(boxes(picture(name)))
    for text, box in np.argwhere(overlaps(places, around) if around else np.zeros((0, 0))):
        (left, top, right, bottom), place = around[box], places[text]
        assert left <= place[0] and place[2] <= right and top <= place[1] and place[3] <= bottom, texts[text]


def test_words_are_escaped():
    drawing = Drawing("a < b & c")
    drawing.box(0, 30, 90, 20, "blank", "<x>")
    assert [text for text, _ in words(drawing.svg())] == ["a < b & c", "<x>"]


def test_short_words_fit():
    assert short("k0..k3", 84) == "k0..k3"
    assert short("k1000000..k1048575", 84) == "k1000000..."
