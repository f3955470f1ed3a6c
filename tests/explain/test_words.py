"""Text for the terminal: what is chosen, what is said to be left out, and tables that fold."""

import pytest

from lockstep.explain.words import Chosen, amount, folded_table, left_out, plural


def test_what_fits_is_shown_whole():
    assert Chosen.of(5, 5) == Chosen((0, 1, 2, 3, 4), 5)
    assert Chosen.of(5, 5).left_out("rank") == ""
    assert left_out("", "") == []


def test_of_more_the_first_and_the_last_are_shown():
    some = Chosen.of(1000, 4)
    assert some.shown == (0, 1, 2, 999)
    assert [some.gap_before(number) for number in some.shown] == [False, False, False, True]
    assert left_out(some.left_out("step"), "", Chosen.of(5, 4).left_out("rank")) == [
        "Left out: steps 3 to 998 of 1,000; rank 3 of 5."
    ]


@pytest.mark.parametrize(
    "count, said",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (87_190_688, "87.2 MB"),
        (999_600, "1 MB"),
        (4e9, "4 GB"),
        (3e12, "3 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(count, said):
    assert amount(count) == said


def test_one_thing_has_no_s():
    assert [plural(count, "rank") for count in (0, 1, 2, 4096)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "4,096 ranks",
    ]
    assert [plural(count, "micro-batch") for count in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_columns_that_do_not_fit_go_on_below():
    heads = [f"step {number}" for number in range(4)]
    lines = folded_table("", heads, [("rank 0", ["x" * 28] * 4), ("rank 1", ["y"] * 4)])
    assert lines == [
        f"{'':8}{'step 0':30}{'step 1':30}step 2",
        f"rank 0  {'x' * 28}  {'x' * 28}  {'x' * 28}",
        f"rank 1  {'y':30}{'y':30}y",
        "",
        "        step 3",
        f"rank 0  {'x' * 28}",
        "rank 1  y",
    ]
    assert max(map(len, lines)) <= 100
