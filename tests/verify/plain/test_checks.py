"""The checks of values, settings, buffers and updates."""

import numpy as np
import pytest
from tests.verify.plain.recordings import all_ranks, changed, measure, on_rank_1, recording

from lockstep.verify import Cause
from lockstep.verify.plain import Measure, diagnose_plain


def other_update(step, rank):
    step.values = {name: measure(2 * np.array(each.sketch)) for name, each in step.values.items()}


CASES = {
    "another update": (other_update, Cause.UPDATE),
    "a parameter that one rank has for itself": (
        on_rank_1(lambda s: s.values.update(first=Measure("own", s.values["first"].norm, s.values["first"].sketch))),
        Cause.REPLICAS,
    ),
    "a learning rate that never was": (lambda s, r: s.settings.update(lr="0.5"), Cause.OPTIMIZER),
    "a schedule that lags": (lambda s, r: s.settings.update(lr=str(0.1 * 0.9)), Cause.SCHEDULE),
    "a step that nobody takes": (all_ranks(updates=0), Cause.UPDATE),
    "a buffer that is not the reference's": (all_ranks(buffers={"mean": measure([7.0, 7.0])}), Cause.BUFFERS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_follows_from_the_records(case):
    change, cause = CASES[case]
    found = diagnose_plain(recording(1), changed(change))
    assert found is not None and found.cause is cause, found


def test_another_class_of_optimizer_is_named_before_the_first_step():
    other = recording(2)
    for rank in other.ranks:
        rank.context["optimizers"] = "torch.optim.adam.Adam default"
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.step) == (Cause.OPTIMIZER, -1)


def test_another_precision_is_named_before_the_first_step():
    other = recording(2)
    other.ranks[1].context["precision"] = "bfloat16"
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.step) == (Cause.PRECISION, -1)
    assert "bfloat16 on rank 1" in found.detail


def test_what_counts_as_rounding_follows_from_the_precision():
    def off(step, rank):
        step.batches[0].losses = [value * 1.01 for value in step.batches[0].losses]

    for precision, is_rounding in (("float32", False), ("bfloat16", True)):
        reference, other = recording(1), changed(off)
        for run in (reference, other):
            for rank in run.ranks:
                rank.context["precision"] = precision
        assert (diagnose_plain(reference, other) is None) is is_rounding
    assert diagnose_plain(recording(1), changed(off), tolerance=0.1) is None


def times(factor):
    return lambda step, rank: step.settings.update(lr=repr(factor * float(step.settings["lr"])))


def test_a_learning_rate_times_the_number_of_ranks_is_told_from_any_other():
    for factor, cause in ((2, Cause.LEARNING_RATE), (3, Cause.OPTIMIZER)):
        other = recording(2)
        for rank in other.ranks:
            for step in rank.steps:
                times(factor)(step, rank)
        found = diagnose_plain(recording(1), other)
        assert (found.cause, found.step) == (cause, 0), found


def test_a_scaled_learning_rate_is_named_with_the_samples_of_the_step():
    """It said that the ranks share one global batch, also where each rank had a batch of its own."""
    runs = [recording(1), recording(2)]
    for rank in runs[1].ranks:
        for step in rank.steps:
            times(2)(step, rank)
    shared = diagnose_plain(*runs).detail
    for rank in runs[1].ranks:
        for step in rank.steps:
            step.batches[0].samples = step.batches[0].samples * 2
    grown = diagnose_plain(*runs).detail
    size = sum(len(batch.samples) for _, batch in runs[0].batches(0))
    assert shared.endswith(f"; {size} samples in this step, and {size} in the reference's")
    assert grown.endswith(f"; {2 * size} samples in this step, and {size} in the reference's")


def test_ranks_that_share_a_seed_are_told_from_the_one_that_has_another():
    other = recording(4)
    other.ranks[2].seed = 7
    other.ranks[2].start["second"] = measure(np.ones(6))
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.tensor) == (Cause.SEEDS, "'second'")
    assert "rank 2 began" in found.detail and found.detail.endswith("the seeds are 0, 0, 7, 0")
    other.ranks[2].seed = 0
    assert diagnose_plain(recording(1), other).cause is Cause.START


def test_another_mode_explains_a_difference_and_is_none_itself():
    other = recording(2)
    for rank in other.ranks:
        rank.modules = ["a", "b"]
    other.ranks[1].steps[1].evaluating = ["b"]
    assert diagnose_plain(recording(1), other) is None
    other.ranks[1].steps[1].batches[0].losses[0] += 1
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.tensor) == (Cause.MODE, "'b'")
    assert found.detail == "eval mode on rank 1, unlike the reference; 1 module"


def test_what_the_optimizer_holds_explains_another_update():
    other = changed(other_update)
    for step in other.at(2):
        step.unheld = ["first"]
    assert diagnose_plain(recording(1), other).cause is Cause.NOT_HELD
    reference, other = recording(1), changed(other_update)
    for step in (*reference.at(2), *other.at(2)[:1]):
        step.state = {"momentum of first": measure([3.0])}
    found = diagnose_plain(reference, other)
    assert found.cause is Cause.UPDATE, "rank 0 has the state, and another update all the same"
    other.ranks[0].steps[2].state = {}
    found = diagnose_plain(reference, other)
    assert (found.cause, found.tensor) == (Cause.OPTIMIZER_STATE, "momentum of first")
    assert found.detail == "absent on the ranks; norm 3 in the reference"


def test_parameters_that_shrink_are_told_from_steps_of_another_size():
    for decay, factor, cause in ((0.1, 1, Cause.DECAY), (0, 3, Cause.UPDATE)):
        other = recording(2)
        for rank in other.ranks:
            before, now = rank.steps[2].values, rank.steps[3].values
            for name, each in now.items():
                old = np.array(before[name].sketch)
                now[name] = measure(old + factor * (np.array(each.sketch) - old) - decay * old)
        found = diagnose_plain(recording(1), other)
        assert (found.cause, found.step) == (cause, 3), found
        assert ("0.1 of the parameter" if decay else "3 times as large") in found.detail


def test_a_buffer_that_one_rank_updates_is_said_to_be_its_own():
    def kept(step):
        step.buffers = {"mean": measure([1.0, 1])}

    found = diagnose_plain(recording(1), changed(on_rank_1(kept)))
    assert found.cause is Cause.BUFFERS
    assert found.detail.endswith("only rank 0 updated it")
