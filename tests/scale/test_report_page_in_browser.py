"""The page of ``lockstep scale`` as Chromium shows it."""

import io

import pytest
from PIL import Image
from tests.scale.browser import OVERLAPPING_WORDS, needs_browser, open_page
from tests.scale.test_prediction import ONE
from tests.scale.test_report_page import a_row

from lockstep.scale.measured import Row
from lockstep.scale.prediction import PRESETS, WORLDS, CheckedPrediction, Forecast, predict
from lockstep.scale.report import ScaleReport, page

STRATEGIES = ("ddp", "fsdp", "pipeline", "parameter_server", "hybrid data=2,fsdp=2")
WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
HIDDEN = """[...document.querySelectorAll("h1, h2, p, table, svg, .bar")]
  .filter(e => !e.checkVisibility() || e.getBoundingClientRect().height < 10).map(e => e.outerHTML.slice(0, 80))"""
BARS = """[...document.querySelectorAll(".bar")].map(bar => {
  const room = bar.getBoundingClientRect().width;
  return [...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / room;
})"""


@pytest.fixture(scope="module")
def report():
    rows = [a_row("single", 1, 61.5)]
    rows += [a_row(name, devices, 70.25 / devices) for devices in (2, 4) for name in STRATEGIES]
    refused = Row("tensor on 4", "tensor", 4, "the model has no <plan> & no layers.")
    worlds = [predict(ONE, devices, preset, adding=1e10) for devices in WORLDS for preset in PRESETS.values()]
    messages = {ranks: {1 << power: 1e-9 * (1 << power) for power in (12, 20, 24)} for ranks in (2, 4)}
    here = tuple(CheckedPrediction(f"ddp on {devices}", devices, 31.0, 35.1) for devices in (2, 4))
    forecast = Forecast(ONE, 1e10, messages, here, tuple(worlds))
    return ScaleReport("flowers", 20, 3, (*rows, refused), "ddp on 4 reaches 76 %: <exchange>.", forecast=forecast)


@pytest.fixture
def written(report, tmp_path):
    (tmp_path / "scale.html").write_text(page(report), encoding="utf-8")
    return tmp_path / "scale.html"


@needs_browser
@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_is_shown_whole_asks_for_nothing_and_complains_of_nothing(report, written, width):
    with open_page(written, width) as shown:
        assert shown.requests == [] and shown.complaints == []
        text = shown.value("document.body.innerText")
        for said in (
            report.limit,
            "no <plan> & no layers",
            *(row.label for row in report.rows),
            "infiniband",
        ):
            assert said in text
        assert shown.value(HIDDEN) == []
        assert shown.value(OVERLAPPING_WORDS) == []
        assert shown.value(WIDER_THAN_THE_WINDOW) <= 0, "wide tables scroll within the page"
        bars = shown.value(BARS)
        assert len(bars) == sum(row.devices for row in report.rows if not row.refused)
        assert max(bars) == pytest.approx(1.0, abs=0.01) and min(bars) > 0.1
        picture = Image.open(io.BytesIO(shown.screenshot()))
        assert picture.height > 1500
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
        assert {(0x2F, 0x6D, 0xB5), (0xB8, 0x62, 0x1B)} <= colours, "the bars are painted"


@needs_browser
def test_a_page_that_is_none_of_this_is_found_out(tmp_path):
    """Else the test above would see nothing in anything."""
    (tmp_path / "bad.html").write_text(
        '<h1 style="display:none">x</h1><p style="width: 2000px">wide</p><img src="absent.png">'
        '<svg width="90" height="40"><text x="5" y="20">one</text><text x="9" y="20">two</text>'
        '<text x="80" y="20">three</text></svg><script>console.error("told"); absent()</script>'
    )
    with open_page(tmp_path / "bad.html", 700) as shown:
        assert [url.rpartition("/")[2] for url in shown.requests] == ["absent.png"]
        assert len(shown.complaints) == 3 and "told" in shown.complaints
        assert shown.value(HIDDEN) == ['<h1 style="display:none">x</h1>']
        assert shown.value(OVERLAPPING_WORDS) == ["one on two", "three cut"]
        assert shown.value(WIDER_THAN_THE_WINDOW) > 0
