"""Pictures of any numbers, as Chromium shows them: no words on others, and none cut off."""

import pytest
from tests.explain.figures import figures
from tests.scale.browser import OVERLAPPING_WORDS, needs_browser, open_page

from lockstep.explain.pipeline import explain_pipeline, pipeline_svg
from lockstep.explain.samples import explain_samples, samples_svg
from lockstep.explain.traffic import explain_traffic, traffic_svg
from lockstep.explain.tree import explain_tree, tree_svg


def pictures():
    yield from figures().values()
    for samples, ranks, batch in ((1, 1, 1), (40, 3, 4), (1_000_003, 16, 64)):
        yield samples_svg(explain_samples(samples=samples, ranks=ranks, batch=batch, shuffle=True, epoch=3))
    for micro_batches, ranks in ((1, 1), (13, 5), (64, 7), (4096, 100)):
        yield tree_svg(explain_tree(micro_batches=micro_batches, ranks=ranks))
    for ranks, servers, parameters in ((1, 1, 10), (3, 2, 100), (8, 3, 7 * 10**9), (64, 8, 25_000_000)):
        yield traffic_svg(explain_traffic(ranks=ranks, servers=servers, parameters=parameters))
    for stages, micro_batches in ((1, 2), (2, 4), (8, 32), (32, 256)):
        yield pipeline_svg(explain_pipeline(stages=stages, micro_batches=micro_batches))


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_words_lie_on_others_or_are_cut_off(tmp_path, scheme):
    drawn = list(pictures())
    (tmp_path / "all.html").write_text(f'<meta charset="utf-8">{"".join(drawn)}', encoding="utf-8")
    with open_page(tmp_path / "all.html", scheme=scheme) as shown:
        assert shown.value("document.querySelectorAll('svg').length") == len(drawn)
        assert shown.requests == [] and shown.complaints == []
        assert shown.value(OVERLAPPING_WORDS) == []
        words, ground = shown.value(CONTRAST)
        assert abs(words - ground) > 120, f"words of brightness {words} on {ground}"


CONTRAST = """(() => {
  const bright = colour => colour.match(/[0-9]+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) / 3;
  const svg = document.querySelector("svg");
  return ["text", "rect"].map(name => bright(getComputedStyle(svg.querySelector(name)).fill));
})()"""
