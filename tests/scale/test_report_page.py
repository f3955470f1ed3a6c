"""The bar chart of seconds per epoch, and the page."""

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from PIL import Image

from lockstep.explain.chart import Label, Rectangle, png, svg
from lockstep.scale.measured import Row, Spread
from lockstep.scale.report import ScaleReport, chart, page


def a_row(strategy, devices, seconds):
    epoch = Spread(seconds, 0.9 * seconds, 1.2 * seconds)
    phases = {"forward": seconds / 100, "exchange": 0.001}
    one = Spread(1.0, 1.0, 1.0)
    ranks = (phases,) * devices
    return Row(f"{strategy} on {devices}", strategy, devices, "", epoch, epoch, one, one, one, phases, ranks)


ROWS = [a_row("single", 1, 60.0), a_row("ddp", 2, 30.0), a_row("fsdp", 2, 40.0), a_row("ddp", 4, 15.0)]


def test_bars_are_as_high_as_epochs_are_long_and_of_one_colour_per_strategy():
    boxes = [shape for shape in chart(ROWS, "Epochs").shapes if isinstance(shape, Rectangle)]
    bars = [box for box in boxes if 30 < box.width < 40]
    assert [bar.height / bars[0].height for bar in bars] == pytest.approx([1.0, 0.5, 2 / 3, 0.25])
    assert bars[1].colour == bars[3].colour != bars[2].colour
    assert len({bar.y + bar.height for bar in bars}) == 1
    spans = [box for box in boxes if box.width == 1.5]
    assert [span.height / bar.height for span, bar in zip(spans, bars)] == pytest.approx([0.3] * 4)


@pytest.mark.parametrize("seconds", [0.00012, 0.7, 1.0, 3.0, 59.9, 86400.0])
def test_everything_lies_within_the_picture_at_any_scale(seconds):
    rows = [a_row("single", 1, seconds), *(a_row(f"strategy number {n}", 2, seconds / 2) for n in range(9))]
    picture = chart(rows, "Epochs")
    ticks = [shape for shape in picture.shapes if isinstance(shape, Label) and shape.at == "end"]
    assert 3 <= len(ticks) <= 8
    for shape in picture.shapes:
        assert 0 <= shape.x <= picture.width
        assert 0 <= shape.y <= picture.height
        if isinstance(shape, Rectangle):
            assert shape.height >= 0
            assert shape.x + shape.width <= picture.width
            assert shape.y + shape.height <= picture.height


def test_svg_is_well_formed_and_says_every_number():
    drawn = ElementTree.fromstring(svg(chart(ROWS, "Epochs of <digits>")))
    words = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Epochs of <digits>", "60", "30", "40", "15", "1", "2", "4", "single", "ddp", "fsdp"} <= set(words)


def test_png_shows_the_same_bars():
    picture = chart(ROWS, "Epochs")
    image = Image.open(io.BytesIO(png(picture)))
    assert image.size == (round(2 * picture.width), round(2 * picture.height))
    bar = next(shape for shape in picture.shapes if isinstance(shape, Rectangle) and 30 < shape.width < 40)
    pixel = image.getpixel((round(2 * bar.x + 8), round(2 * (bar.y + bar.height) - 8)))
    assert "#{:02x}{:02x}{:02x}".format(*pixel) == bar.colour


class Tags(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self):
        super().__init__()
        self.open, self.names, self.text = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_asks_for_nothing():
    refused = Row("tensor on 2", "tensor", 2, refused="no plan for <Net>.")
    written = page(ScaleReport("digits", 20, 3, (*ROWS, refused), "Too few cores."))
    tags = Tags()
    tags.feed(written)
    assert not tags.open
    assert {"svg", "table"} <= tags.names
    assert not tags.names & {"script", "img", "iframe"}
    addresses = set(re.findall(r"https?://[^\"']+", written))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format, never fetched"
    text = " ".join(tags.text)
    assert "Too few cores." in text
    assert "tensor on 2 did not run: no plan for <Net>." in text
    assert "ddp on 4, rank 3" in text
