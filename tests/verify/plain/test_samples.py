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
    for name in ("samples", "inputs", "losses"):
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
