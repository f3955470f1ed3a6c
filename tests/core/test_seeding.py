"""Seeds are keys: golden values, since another one would change every run that was ever recorded."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.seeding import derive_seed, held_out, permutation_key, sample_seeds, unit_seed
from lockstep.errors import ConfigError, DataError


def sample_seed(seed, epoch, index):
    """The seed of one sample."""
    return derive_seed(seed, "sample", epoch, index)


@pytest.mark.parametrize("seed", ["{seed}", 1.0, None, 1 << 63])
def test_a_seed_that_is_no_number_of_64_bits_is_refused(seed):
    """A misspelt placeholder in a job file came as far as this, and ended in a traceback."""
    with pytest.raises(ConfigError, match="is not an integer of 64 bits"):
        derive_seed(seed, "purpose")


def test_seeds_are_what_they_were():
    assert derive_seed(0, "purpose") == 2_546_558_160_564_724_571
    assert derive_seed(0, "purpose", 1, "a", -1) == 4_240_816_827_879_932_407
    assert sample_seed(0, 0, 0) == 8_787_984_545_455_317_598
    assert sample_seed(7, 3, 1234) == 4_712_892_253_396_324_096
    assert unit_seed(7, 100, 5, "blocks.3.drop", 1) == 8_601_503_257_692_078_655
    assert unit_seed(7, 100, 5, "blocks.3.drop", 1, segment=2) == 7_037_503_397_872_407_893
    assert permutation_key(7, 3) == 7_854_897_471_193_747_598


def test_every_part_of_a_key_matters():
    base = {"seed": 1, "step": 2, "micro_batch": 3, "unit": "a", "call": 4, "segment": 5}
    variants = [
        base,
        *({**base, name: f"{value}x" if name == "unit" else value + 1} for name, value in base.items()),
    ]
    assert len({unit_seed(**each) for each in variants}) == len(variants)


def test_parts_cannot_be_moved_from_one_to_the_next():
    keys = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        ("", "abc"),
        (1, 2),
        (12,),
        ("1", 2),
        (1, "2"),
        ("1", "2"),
    ]
    assert len({derive_seed(0, "x", *key) for key in keys}) == len(keys)


def test_purposes_do_not_share_seeds():
    assert len({derive_seed(0, purpose, 1, 2) for purpose in ("sample", "unit", "permutation", "loop", "numpy")}) == 5


def test_neighbouring_keys_have_unrelated_seeds():
    seeds = [sample_seed(seed, epoch, index) for seed, epoch, index in itertools.product(range(4), range(4), range(64))]
    assert len(set(seeds)) == len(seeds)
    flipped = [bin(one ^ other).count("1") for one, other in itertools.pairwise(seeds)]
    assert 30 < sum(flipped) / len(flipped) < 33


@settings(deadline=None)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.text()), max_size=4),
)
def test_a_seed_has_63_bits_and_can_be_computed_again(seed, key):
    found = derive_seed(seed, "purpose", *key)
    assert 0 <= found < 2**63
    assert found == derive_seed(seed, "purpose", *key)


@pytest.mark.parametrize("name", ["", "layer.ü", "a" * 1000])
def test_any_unit_name_has_a_seed(name):
    assert unit_seed(0, 0, 0, name, 0) != unit_seed(0, 0, 0, f"{name}.0", 0)


def test_seeds_of_many_samples_are_those_of_each():
    indices = [0, 1, 7, 2**40, 5]
    assert sample_seeds(3, -1, indices) == [sample_seed(3, -1, index) for index in indices]
    with pytest.raises(ConfigError, match="not an integer of 64 bits"):
        sample_seeds(2**70, 0, [1])


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
