"""The check of gradients: the weights with which they were summed."""

import numpy as np
import pytest
from tests.verify.plain.recordings import NAMES, STEPS, changed, measure, not_reduced, recording, reduced_with

from lockstep.verify import Cause
from lockstep.verify.plain import diagnose_plain

CASES = {
    "gradients that nobody reduces": (not_reduced, Cause.NOT_REDUCED),
    "gradients of one layer that are gone": (lambda s, r: s.used.pop("third"), Cause.LEFT_OUT),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_follows_from_the_records(case):
    change, cause = CASES[case]
    found = diagnose_plain(recording(1), changed(change))
    assert found is not None and found.cause is cause, found


WEIGHTS = {
    "summed and not divided": ((1.0, 1.0), Cause.GRADIENT_SCALE, "2 times"),
    "divided twice": ((0.25, 0.25), Cause.GRADIENT_SCALE, "0.5 times"),
    "not in proportion": ((0.7, 0.3), Cause.LOSS_WEIGHTING, "weights 0.7, 0.3"),
    "only rank 0's": ((1.0, 0.0), Cause.NOT_REDUCED, "rank 1 do not count"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_the_weights_of_a_wrong_sum_are_named(case):
    weights, cause, detail = WEIGHTS[case]
    made = recording(2)
    reduced_with(*weights)(made)
    found = diagnose_plain(recording(1), made)
    assert (found.cause, found.step) == (cause, 2)
    assert detail in found.detail


def test_weights_that_cut_gradients_down_to_one_norm_are_clipping():
    for cap in (0.5, 1.0):
        made = recording(4)
        for number in range(2, STEPS):
            reduced_at(made, number, cap)
        found = diagnose_plain(recording(1), made)
        assert found.cause is Cause.CLIPPING, found
    made = recording(2)
    reduced_with(0.3, 0.7)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.LOSS_WEIGHTING


def reduced_at(made, number, cap):
    """Clips the largest gradients to a share of the largest norm's median, and reduces them."""
    steps = made.at(number)
    norms = [np.hypot.reduce([each.norm for each in step.batches[0].gradients.values()]) for step in steps]
    limit = cap * float(np.median(norms))
    factors = [min(1.0, limit / norm) / len(steps) for norm in norms]
    for name in NAMES:
        parts = [np.array(step.batches[0].gradients[name].sketch) for step in steps]
        total = sum(factor * part for factor, part in zip(factors, parts))
        for step in steps:
            step.used[name] = measure(total)


def test_accumulation_without_scaling_is_told_from_a_sum_that_is_not_divided():
    made = recording(2, accumulate=2)
    reduced_with(0.5, 0.5, 0.5, 0.5)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.ACCUMULATION
    reduced_with(1.0, 1.0, 1.0, 1.0)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.GRADIENT_SCALE


def test_a_reduction_that_is_no_weighted_sum_is_not_called_one():
    made = recording(2)
    for number in range(2, STEPS):
        for step in made.at(number):
            step.used = {name: measure(np.sign(each.sketch)) for name, each in step.used.items()}
    found = diagnose_plain(recording(1), made)
    assert found.cause is Cause.GRADIENTS
    assert "no weighted sum" in found.detail
