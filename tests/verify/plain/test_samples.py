"""The checks of samples and their losses."""

import pytest
from tests.verify.plain.recordings import changed, on_rank_1, other_samples, recording

from lockstep.verify import Cause
from lockstep.verify.plain import diagnose_plain


def other_losses(step, rank):
    step.batches[0].losses = [value + 1 for value in step.batches[0].losses]


def other_losses_with_numbers_drawn(step, rank):
    other_losses(step, rank)
    step.batches[0].generators = (f"state {rank}", "after")


def _shorten(batch):
    for name in ("samples", "inputs", "losses", "targets", "outputs"):
        setattr(batch, name, getattr(batch, name)[:-1])


CASES = {
    "samples that nobody reads": (on_rank_1(lambda s: _shorten(s.batches[0])), Cause.DROPPED),
    "other samples": (other_samples, Cause.DATA_ORDER),
    "other losses": (other_losses, Cause.FORWARD),
    "other losses and numbers drawn": (other_losses_with_numbers_drawn, Cause.MODEL_RANDOMNESS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_follows_from_the_records(case):
    change, cause = CASES[case]
    found = diagnose_plain(recording(1), changed(change))
    assert found is not None and found.cause is cause, found


def all_runs(change, *runs):
    """Changes every batch of every step: ``change(batch)``."""
    for run in runs:
        for step in range(run.length):
            for _, batch in run.batches(step):
                change(batch)


def with_outputs(batch):
    batch.outputs = [[1.0 + sample, 2.0] for sample in batch.samples]


def with_targets(batch):
    batch.targets = [sample % 2 for sample in batch.samples]


def pair(*changes):
    reference, other = recording(1), recording(2)
    for change in changes:
        all_runs(change, reference, other)
    return reference, other


def test_a_loss_that_differs_for_equal_outputs_is_told_from_an_output_that_differs():
    reference, other = pair(with_outputs)
    other_losses(other.ranks[1].steps[3], 1)
    found = diagnose_plain(reference, other)
    assert (found.cause, found.step) == (Cause.LOSS, 3)
    assert "targets of other samples" in found.possible
    other.ranks[1].steps[3].batches[0].outputs = [[9.0, 9.0]] * 4
    assert diagnose_plain(reference, other).cause is Cause.OUTPUT
    other.ranks[1].steps[3].batches[0].outputs = []
    assert diagnose_plain(reference, other).cause is Cause.FORWARD


def test_losses_of_a_rank_that_have_one_factor_are_said_to_have_it():
    reference, other = pair(with_outputs)
    batch = other.ranks[1].steps[2].batches[0]
    batch.losses = [1.5 * loss for loss in batch.losses]
    found = diagnose_plain(reference, other)
    assert found.cause is Cause.LOSS
    assert "1 times on rank 0, 1.5 times on rank 1" in found.detail


def test_factors_that_follow_the_class_are_class_weights():
    reference, other = pair(with_outputs, with_targets)
    for rank, weights in ((0, (1.2, 0.9)), (1, (0.8, 1.1))):
        for step in other.ranks[rank].steps:
            batch = step.batches[0]
            batch.losses = [weights[target] * loss for target, loss in zip(batch.targets, batch.losses)]
    found = diagnose_plain(reference, other)
    assert (found.cause, found.step) == (Cause.CLASS_WEIGHTS, 0)
    assert not found.possible


def test_targets_of_other_samples_are_named():
    reference, other = pair(with_outputs, with_targets)
    batch = other.ranks[1].steps[1].batches[0]
    batch.targets[2] = 7
    batch.losses[2] += 1
    found = diagnose_plain(reference, other)
    assert (found.cause, found.tensor) == (Cause.TARGETS, f"sample {batch.samples[2]}")
    assert found.detail == f"7 on rank 1, and {batch.samples[2] % 2} in the reference"


@pytest.mark.parametrize(("name", "cause"), [("1.calls", Cause.HIDDEN_STATE), ("loss.mean", Cause.LOSS_STATE)])
def test_state_of_the_model_or_the_loss_is_named_where_losses_differ_and_only_there(name, cause):
    reference, other = pair(*[with_outputs] * (cause is Cause.LOSS_STATE))
    for rank in other.ranks:
        rank.steps[1].attributes = {name: "7"}
    assert diagnose_plain(reference, other) is None, "state alone is no mistake"
    other_losses(other.ranks[1].steps[2], 1)
    found = diagnose_plain(reference, other)
    assert found.cause is cause
    assert f"{name!r} is 7 on rank 0 after step 1, as at the beginning in the reference" in found.detail


def test_a_tensor_that_the_model_keeps_may_be_a_copy_and_is_no_certain_cause():
    reference, other = pair()
    other.ranks[0].steps[1].attributes = {"1.last": "tensor 1234"}
    other_losses(other.ranks[1].steps[2], 1)
    found = diagnose_plain(reference, other)
    assert found.cause is Cause.FORWARD and "'1.last' is tensor 1234" in found.detail


def test_a_generator_that_is_alike_on_all_ranks_explains_other_inputs():
    def noisy(step, rank):
        batch = step.batches[0]
        batch.inputs = [f"{each} and noise" for each in batch.inputs]
        batch.states = {"numpy.random": f"state {step.step}", "random": "the same"}

    found = diagnose_plain(recording(1), changed(noisy))
    assert found.cause is Cause.SAME_DRAWS and "numpy.random is in one state" in found.detail

    def own(step, rank):
        noisy(step, rank)
        step.batches[0].states["numpy.random"] += f" of rank {rank}"

    assert diagnose_plain(recording(1), changed(own)).cause is Cause.AUGMENTATION


def test_a_last_batch_that_is_not_read_is_told_from_other_orders():
    reference, other = recording(1), recording(2)
    _shorten(reference.ranks[0].steps[2].batches[0])
    for rank in other.ranks:
        rank.steps[2].batches = rank.steps[3].batches
    found = diagnose_plain(reference, other)
    assert (found.cause, found.step) == (Cause.LAST_BATCH, 2)
    assert "7 samples of step 2 of the reference, whose steps have 8" in found.detail
    reference, other = recording(1), recording(2)
    for rank in other.ranks:
        rank.steps[1].batches = rank.steps[2].batches
    found = diagnose_plain(reference, other)
    assert (found.cause, found.step) == (Cause.DROPPED, 1)
    assert "it reads those of step 2" in found.detail
