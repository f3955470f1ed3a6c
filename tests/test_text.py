"""Plurals, shortened lists, bytes and durations in messages."""

import pytest

from lockstep.text import (
    aligned,
    at_most,
    format_bytes,
    format_duration,
    numbered,
    percent,
    plural,
    printable,
    ranges,
    samples_per_second,
    shorten,
)


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
        (4e15, "4,000 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(count, said):
    assert format_bytes(count) == said


def test_only_all_is_100_percent():
    shares = (0.0, 0.97216, 0.99994, 0.99996, 0.9999999, 1.0)
    shown = ["0.00 %", "97.22 %", "99.99 %", "99.99 %", "100.00 %", "100.00 %"]
    assert [percent(share) for share in shares] == shown
    assert percent(0.9998, 1) == "99.9 %"


def test_a_slow_speed_has_three_digits():
    """16 samples in 24.4 s were 1 samples/s."""
    speeds = [samples_per_second(speed) for speed in (0.6557, 9.96, 99.4, 99.6, 17101.3)]
    numbers = ["0.656", "9.96", "99.4", "100", "17,101"]
    assert speeds == [f"{number} samples/s" for number in numbers]


def test_one_thing_has_no_s():
    assert [plural(count, "rank") for count in (0, 1, 2, 4096)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "4,096 ranks",
    ]
    assert [plural(count, "micro-batch") for count in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert plural(2, "epoch") == "2 epochs"


def test_memory_is_counted_in_binary_units():
    sizes = (500, 2048, 87_190_688, 1010 << 20, 3 << 40, 5000 << 40)
    said = [format_bytes(size, binary=True) for size in sizes]
    assert said == ["500 B", "2 KiB", "83.2 MiB", "0.986 GiB", "3 TiB", "5,000 TiB"]


def test_numbers_that_follow_each_other_are_a_range():
    assert ranges([5, 1, 0, 2, 3]) == "0-3, 5"
    assert ranges([]) == ""
    assert ranges(range(0, 40, 2), 3) == "0, 2, 4 and 17 more"
    assert [numbered("rank", ranks) for ranks in ([3], [3, 4], range(4))] == [
        "rank 3",
        "ranks 3, 4",
        "ranks 0-3",
    ]


def test_long_lists_are_cut_and_counted():
    assert shorten("abc") == "a, b, c"
    assert shorten("abcd", limit=2) == "a, b and 2 more"
    assert shorten(range(3)) == "0, 1, 2"
    assert shorten(range(17)) == ", ".join(map(str, range(16))) + " and 1 more"


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([("a", "bb", "c"), ("aaa", "b", "")]) == ["a    bb  c", "aaa  b"]


@pytest.mark.parametrize(
    "seconds, said",
    [
        (-1.0, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3900, "1 h 05 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations_have_two_units(seconds, said):
    assert format_duration(seconds) == said


@pytest.mark.fault("T8")
def test_escape_codes_of_names_are_shown_and_not_obeyed():
    assert printable("a\x1b[2J\x07é\r\n\tb\x9b\udcff") == "a\\x1b[2J\\x07é\\x0d\n\tb\\x9b\\udcff"


def test_lines_beyond_a_limit_are_counted():
    lines = ["a", "b", "c"]
    assert at_most(2, lines) == ["a", "b", "and 1 more"]
    assert at_most(3, lines) == at_most(4, lines) == lines
