import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.naming import held_out
from lockstep.errors import ConfigError, DataError


@given(
    st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_some_are_held_out_and_some_are_left_whatever_the_order(names, fraction, seed):
    kept = held_out(sorted(names), fraction, seed, "It")
    assert kept < names and len(kept) == min(max(1, round(len(names) * fraction)), len(names) - 1)
    assert held_out(sorted(names, reverse=True), fraction, seed, "It") == kept


def test_one_name_more_moves_at_most_one_other():
    names = [f"{number}.jpg" for number in range(100)]
    before, after = held_out(names, 0.2, 3, "It"), held_out([*names, "new.jpg"], 0.2, 3, "It")
    assert len(before - after) <= 1


def test_too_few_and_impossible_parts_are_refused():
    with pytest.raises(DataError, match="Class rose has 1 sample, too few"):
        held_out(["a"], 0.2, 0, "Class rose")
    for fraction in (0.0, 1.0, -1.0, 20):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            held_out(["a", "b"], fraction, 0, "It")
