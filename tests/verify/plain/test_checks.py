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
        on_rank_1(
            lambda s: s.values.update(first=Measure("own", s.values["first"].norm, s.values["first"].sketch))
        ),
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
