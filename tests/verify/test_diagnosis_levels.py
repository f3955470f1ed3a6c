"""The level that a layout has reached, by its difference from the reference."""

import math

import torch
from safetensors.torch import save_file
from tests.verify.traces import changed, level_b, scaled, trace

from lockstep.verify import compare
from lockstep.verify.diagnosis import largest_difference


def test_a_layout_that_did_not_keep_level_a_is_broken_and_one_of_level_b_is_not():
    other = changed(scaled(1.0 + 1e-7))
    assert compare(trace(), other, 1e-7).is_broken
    other.level = "B"
    found = compare(trace(), other, 1e-7)
    assert (found.reached, found.is_broken) == ("B", False)


def test_a_difference_beyond_the_bound_is_not_level_b_however_it_is_explained():
    unexplained, within, beyond = level_b(0.5), level_b(0.5, 0.2), level_b(0.5, 0.02)
    assert [each.reached for each in (unexplained, within, beyond)] == ["-", "~", "-"]
    assert [each.is_broken for each in (unexplained, within, beyond)] == [True, False, True]
    assert [each.needs_sensitivity for each in (unexplained, within, beyond)] == [True, False, False]
    assert level_b(float("nan"), 0.2).is_broken
    assert level_b(9.8, 0.2).reached == "~", "runs that have parted have no distance to compare"
    assert level_b(0.5, 0.2, factor=2.0).reached == "-", "gradients twice as large are not rounding"
    assert not level_b(1e-4).needs_sensitivity


def test_a_run_of_another_number_of_steps_reaches_no_level():
    for level in ("A", "B"):
        found = compare(trace(), trace(2, level=level), 0.0)
        assert (found.reached, found.is_broken) == ("-", True)


def test_what_is_changed_after_the_last_step_is_not_equal():
    """A script that divided its weights by the number of processes at the end had equal bits."""
    found = compare(trace(), trace(), 0.5)
    assert (found.reached, found.is_broken) == ("-", True)
    assert found.diagnosis.text.startswith("step 3, the parameters: values changed")
    assert found.diagnosis.detail == "after the last step, by 5.0e-01"


def test_nan_and_whole_numbers_after_the_last_step_are_differences(tmp_path):
    """A script that set its weights to NaN on two processes after the last step had equal bits."""

    def difference(one, two):
        for name, tensor in (("one", one), ("two", two)):
            save_file({"kept": torch.zeros(2), "odd": torch.tensor(tensor)}, tmp_path / name)
        return largest_difference(tmp_path / "one", tmp_path / "two")

    nan = float("nan")
    assert difference([1.0, 2.0], [1.0, nan]) == difference([nan], [1.0]) == math.inf
    assert difference([nan, 1.0], [nan, 1.0]) == difference([True], [True]) == 0.0
    assert difference([4], [7]) == 0.75
    assert difference([1.0], [1.0, 2.0]) == math.inf
