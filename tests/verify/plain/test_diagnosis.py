"""The first difference of two recordings and its cause."""

import pytest
from tests.verify.plain.recordings import STEPS, changed, not_reduced, other_samples, recording, rounded

from lockstep.errors import ConfigError
from lockstep.verify import Cause
from lockstep.verify.plain import diagnose_plain


def test_differences_within_rounding_are_those_of_another_order():
    assert diagnose_plain(recording(1), changed(rounded)).cause is Cause.REDUCTION_ORDER


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
