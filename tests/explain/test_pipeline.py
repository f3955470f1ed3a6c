"""The picture of a pipeline is the order in which its ranks compute."""

import pytest

from lockstep.errors import ConfigError
from lockstep.explain.pipeline import explain_pipeline, pipeline_text
from lockstep.strategies.pipeline import schedule
from lockstep.strategies.pipeline.schedule import order_of


def test_the_timelines_of_the_docs_come_out_again():
    text = pipeline_text(explain_pipeline(stages=2, micro_batches=4)).splitlines()
    pictures = [" ".join(line.split()) for line in schedule.__doc__.splitlines()]
    for name in ("gpipe", "1f1b"):
        at = next(number for number, line in enumerate(pictures) if line.startswith(f"{name} rank 0 "))
        for rank in (0, 1):
            assert " ".join(text[text.index(name) + 1 + rank].split()) in pictures[at + rank]


@pytest.mark.parametrize("stages, count, each", [(1, 3, 2), (2, 4, 2), (3, 6, 3), (4, 8, 2), (5, 5, 1)])
def test_every_rank_does_what_the_schedule_says_when_it_can(stages, count, each):
    for times in explain_pipeline(stages=stages, micro_batches=count, stages_per_rank=each).timelines:
        own = each if times.schedule == "interleaved" else 1
        done = {span.action: span.stop for mine in times.spans for span in mine}
        for rank, mine in enumerate(times.spans):
            order = order_of(times.schedule, rank, stages, own, count)
            assert tuple(span.action for span in mine) == order
            for span in mine:
                needs = schedule.needs(span.action, stages * own - 1)
                assert all(done[need] <= span.start for need in needs)
        assert times.waits == pytest.approx(times.bubble)
        assert times.length == max(done.values())


def test_what_is_kept_is_the_papers_number():
    kept = {times.schedule: times.kept for times in explain_pipeline(stages=4, micro_batches=8).timelines}
    assert kept == {"1f1b": 4, "gpipe": 8, "interleaved": 5.5}


def test_a_schedule_that_does_not_fit_is_left_out_with_the_reason():
    facts = explain_pipeline(stages=3, micro_batches=4)
    assert [times.schedule for times in facts.timelines] == ["1f1b", "gpipe"]
    assert "micro_batches=4 do not fit the interleaved schedule" in pipeline_text(facts)


def test_long_timelines_go_on_below_and_very_long_ones_end_with_a_word():
    short = pipeline_text(explain_pipeline(stages=4, micro_batches=8, schedules=("1f1b",))).splitlines()
    assert short[7] == "from unit 17 of 33:"
    whole = "F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- .. B5 -- .. B6 -- .. B7 --"
    assert " ".join(short[number].removeprefix("rank 0  ") for number in (3, 8)) == whole
    long = pipeline_text(explain_pipeline(stages=16, micro_batches=64))
    assert max(map(len, long.splitlines())) <= 100
    assert "Left out: ranks 11 to 14 of 16; units 66 to 236 of 237." in long


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({"stages": 5, "micro_batches": 3}, "A pipeline of 5 stages is not filled by micro_batches=3"),
        ({"schedules": ("gpip",)}, "--schedule=gpip is not known. Did you mean 'gpipe'"),
        ({"stages": 0}, "--stages should be at least 1"),
        (
            {"stages": 1000, "micro_batches": 1000},
            "--micro-batches=1000 make more than 100,000 passes, the most",
        ),
        ({"stages": 3, "micro_batches": 4, "schedules": ("interleaved",)}, "for example micro_batches=3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, said):
    with pytest.raises(ConfigError, match=said):
        explain_pipeline(**numbers)
