"""Text for the terminal: what is chosen, what is said to be left out, and tables that fold."""

from lockstep.explain.drawing import Chosen, folded_table, left_out


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


def test_columns_that_do_not_fit_go_on_below():
    heads = [f"step {number}" for number in range(4)]
    lines = folded_table(heads, [("rank 0", ["x" * 28] * 4), ("rank 1", ["y"] * 4)])
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
