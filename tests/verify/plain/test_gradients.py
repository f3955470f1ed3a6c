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


def test_gradients_that_differ_are_not_said_to_do_so_although_losses_do_not_where_these_were_not_recorded():
    """A loop with BatchNorm or dropout that recorded only its mean loss was told that its losses do not differ."""
    runs = [recording(1), recording(2)]
    for number in range(STEPS):
        for step in runs[1].at(number):
            step.used = {name: measure(np.sign(each.sketch)) for name, each in step.used.items()}
        for batch in (each for run in runs for step in run.at(number) for each in step.batches):
            batch.losses = []
    found = diagnose_plain(*runs)
    assert found.cause is Cause.NO_LOSSES
    assert "although" not in found.text and "recorder.batch(losses=...)" in found.text and "BatchNorm" in found.text


def of_names(made, number, names, factor):
    """Multiplies the reduced gradient of some parameters in a step."""
    for step in made.at(number):
        for name in names:
            step.used[name] = measure(factor * np.array(step.used[name].sketch))


def test_a_parameter_that_is_summed_twice_is_not_called_left_out():
    reference, made = recording(1), recording(2)
    of_names(made, 3, ["third"], 2)
    found = diagnose_plain(reference, made)
    assert (found.cause, found.tensor) == (Cause.REDUCED_TWICE, "'third'")
    reference.ranks[0].tied = {"third": ["head"]}
    assert "'head' too, a tied parameter" in diagnose_plain(reference, made).detail
    made = recording(2)
    of_names(made, 3, ["third"], 0.7)
    assert diagnose_plain(reference, made).cause is Cause.LEFT_OUT


def test_micro_batches_that_are_reduced_again_with_each_later_one():
    made = recording(2, accumulate=2)
    reduced_with(0.5, 0.25, 0.5, 0.25)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.REDUCED_AGAIN
    made = recording(2, accumulate=2)
    reduced_with(0.25, 0.5, 0.25, 0.5)(made)
    found = diagnose_plain(recording(1), made)
    assert found.cause is Cause.LOSS_WEIGHTING
    assert "the last micro-batch of each rank counts 2 times as much" in found.detail


def test_one_more_part_of_a_gradient_is_named_with_its_weight():
    for kind, cause, said in (
        ("values", Cause.DECAY, "0.3 of the parameter"),
        ("used", Cause.CARRIED, "those of step 2 have the weight 0.3"),
    ):
        made = recording(2)
        for name in NAMES:
            extra = 0.3 * np.array(getattr(made.ranks[0].steps[2], kind)[name].sketch)
            for step in made.at(3):
                step.used[name] = measure(np.array(step.used[name].sketch) + extra)
        found = diagnose_plain(recording(1), made)
        assert (found.cause, found.step) == (cause, 3), found
        assert said in found.detail


def test_rounding_to_a_coarser_type_explains_what_it_has_led_to_and_nothing_else():
    def rounded(made, names=NAMES):
        for step in made.at(1):
            step.used = {n: measure(np.array(each.sketch) * 1.002) for n, each in step.used.items()}
            step.coarse = dict.fromkeys(names, "bfloat16")
        return made

    assert diagnose_plain(recording(1), rounded(recording(2))) is None, "no bits of parameters differ"
    later = rounded(recording(2))
    later.ranks[1].steps[2].batches[0].losses[0] += 1
    found = diagnose_plain(recording(1), later)
    assert (found.cause, found.step) == (Cause.COMPRESSED, 1)
    samples = rounded(recording(2))
    samples.ranks[1].steps[2].batches[0].samples[0] = 99
    assert diagnose_plain(recording(1), samples).cause is not Cause.COMPRESSED
    alike = rounded(recording(1))
    assert diagnose_plain(alike, later).cause is Cause.FORWARD, "the reference has it too"


def test_an_overflow_that_one_rank_hides_is_named():
    made = recording(2)
    step = made.ranks[1].steps[2]
    step.batches[0].gradients = dict.fromkeys(NAMES, measure([np.inf] * 6))
    reduced = {name: measure(0.5 * np.array(each.sketch)) for name, each in step.used.items()}
    for each in made.at(2):
        each.used = reduced
    found = diagnose_plain(recording(1), made)
    assert found.cause is Cause.OVERFLOW and "rank 1" in found.detail


def test_few_numbers_of_one_parameter_do_not_tell_the_weights_of_many_backward_passes():
    made = recording(4, accumulate=2)
    for number in range(2, STEPS):
        for step in made.at(number):
            step.used["third"] = measure(np.arange(1.0, 7.0))
    found = diagnose_plain(recording(1), made)
    assert (found.cause, found.step, found.tensor) == (Cause.GRADIENTS, 2, "'third'")
    assert found.detail == "the records do not tell with which weights they were summed"
