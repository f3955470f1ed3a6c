"""The first difference of two recordings and its cause."""

import math

import pytest
from tests.verify.plain.recordings import (
    LENGTH,
    STEPS,
    changed,
    measure,
    not_reduced,
    other_samples,
    recording,
    rounded,
)

from lockstep.errors import ConfigError
from lockstep.verify import Cause
from lockstep.verify.plain import Measure, diagnose_plain
from lockstep.verify.plain.diagnosis import compare_plain


def test_differences_within_rounding_are_those_of_another_order():
    assert diagnose_plain(recording(1), changed(rounded)).cause is Cause.REDUCTION_ORDER


def test_an_update_within_rounding_is_no_other_order_where_gradients_have_equal_bits():
    def other_update(step, rank):
        value = step.values["first"]
        step.values = {**step.values, "first": Measure("other", value.norm, value.sketch)}

    assert diagnose_plain(recording(1), changed(other_update)).cause is Cause.UPDATE


def test_another_number_of_steps_on_any_rank_is_a_difference():
    """None was found, where Python asked; nor was it where one rank alone made more steps than the reference."""
    fewer, more, reference = recording(2), recording(2), recording(1)
    for rank in fewer.ranks:
        rank.steps.pop()
    reference.ranks[0].steps.pop()
    more.ranks[0].steps.pop()
    for one, other in ((recording(1), fewer), (reference, more)):
        assert diagnose_plain(one, other).cause is Cause.LENGTH
        assert compare_plain(one, other, "2 processes", again=one).is_broken


def test_values_that_are_no_numbers_after_the_last_step_are_no_rounding():
    """They were within the bound of level B, with a difference of 0."""
    other = recording(2)
    for rank in other.ranks:
        rank.steps[-1].values["first"] = measure([math.nan] * LENGTH)
    found = compare_plain(recording(1), other, "2 processes", again=recording(1))
    assert (found.reached, found.difference) == ("-", math.inf)
    assert (found.diagnosis.cause, found.diagnosis.step) == (Cause.UPDATE, STEPS - 1)


def test_a_sound_run_on_any_number_of_ranks_has_no_difference():
    for ranks, accumulate in ((1, 1), (2, 1), (2, 2), (4, 1), (8, 1)):
        assert diagnose_plain(recording(1), recording(ranks, accumulate)) is None


def test_a_reported_loss_comes_last():
    reference, made = recording(1), recording(2)
    for run in (reference, made):
        for number in range(STEPS):
            everyone = [loss for step in reference.at(number) for loss in step.batches[0].losses]
            for step in run.at(number):
                step.batches[0].loss = sum(everyone) / len(everyone)
    assert diagnose_plain(reference, made) is None
    for step in made.ranks[0].steps:
        step.batches[0].loss = sum(step.batches[0].losses) / len(step.batches[0].losses)
    found = diagnose_plain(reference, made)
    assert (found.cause, found.step) == (Cause.REPORTED, 0)
    assert "the mean of its own samples" in found.detail
    for step in made.at(3):
        not_reduced(step, 0)
    assert diagnose_plain(reference, made).cause is Cause.NOT_REDUCED


def test_an_operator_is_blamed_only_where_the_reference_differs_from_itself():
    other = changed(rounded)
    assert diagnose_plain(recording(1), other, again=recording(1)).cause is Cause.REDUCTION_ORDER
    again = changed(lambda s, r: rounded(s, r), ranks=1)
    assert diagnose_plain(recording(1), other, again=again).cause is Cause.OPERATOR
    assert diagnose_plain(recording(1), changed(not_reduced), again=again).cause is Cause.NOT_REDUCED


def test_other_software_explains_rounding_but_not_other_samples():
    other = changed(rounded)
    for rank in other.ranks:
        rank.context["torch"] = "3"
    assert diagnose_plain(recording(1), other).cause is Cause.SOFTWARE
    other = changed(other_samples)
    for rank in other.ranks:
        rank.context["torch"] = "3"
    assert diagnose_plain(recording(1), other).cause is Cause.DATA_ORDER


def test_a_reference_of_several_processes_is_refused():
    with pytest.raises(ConfigError, match="Record it on one"):
        diagnose_plain(recording(2), recording(2))
