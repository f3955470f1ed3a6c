"""Verify finds planted faults, and blames nothing in loops without them."""

from dataclasses import replace

import pytest
from tests.verify.planted.catalogue import FAULTS
from tests.verify.planted.faults import (
    ClippedFirst,
    CompressedGradients,
    EmaOnRank0,
    Fused,
    LossWithState,
    OptimizerOfAnotherModel,
    OtherThreads,
    OverflowOnOneRank,
    ReducedEarly,
    SkippedOnOneRank,
    SwappedStages,
    TiedWeightTwice,
    UnscaledAccumulation,
)
from tests.verify.planted.running import run_all
from tests.verify.planted.table import PAGE, page
from tests.verify.planted.unforeseen import UNFORESEEN

from lockstep.verify import Cause

pytestmark = pytest.mark.slow  # twenty worlds of processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("planted"))


def test_every_fault_is_found_and_nearly_all_causes_are_right(results):
    missed = [each.fault.loop.__name__ for each in results if not each.is_found]
    wrong = {each.fault.loop.__name__: each.found.text for each in results if each.found and not each.is_right}
    assert not missed
    assert len(wrong) <= 2, wrong


def test_sound_loops_differ_by_rounding_at_most(results):
    blamed = {
        each.fault.sound.__name__: each.sound.text
        for each in results
        if each.sound is not None and each.sound.cause is not Cause.REDUCTION_ORDER
    }
    assert list(blamed) == ["Dropping"], blamed
    assert Cause.MODEL_RANDOMNESS.value in blamed["Dropping"]


def test_most_causes_are_right_where_the_reference_is_the_same_script(results):
    wrong = [each.fault.loop for each in results if not each.is_right_alone]
    assert set(wrong) <= {UnscaledAccumulation, OtherThreads, Fused}


def test_the_page_says_what_verify_says(results):
    assert PAGE.read_text() == page(results), "write it anew: python -m tests.verify.planted"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"adam": True}, {"ddp": True}, {"adam": True, "ddp": True}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_causes_are_right_in_other_worlds_with_other_optimizers_and_with_ddp(ranks, options, tmp_path):
    faults = [
        replace(fault, ranks=ranks)
        for fault in FAULTS
        if not ("ddp" in options and cannot_happen_with_ddp(fault.loop))
        and not (fault.loop is SwappedStages and ranks != 4)
    ]
    found = run_all(tmp_path, faults, **options)
    wrong = {each.fault.loop.__name__: each.found and each.found.text for each in found if not each.is_right}
    blamed = {
        each.fault.sound.__name__: each.sound.text
        for each in found
        if each.sound is not None and each.sound.cause is not Cause.REDUCTION_ORDER
    }
    if ranks == 4:  # two samples a rank are hardly ever of one class
        assert "weights or a divisor computed from each rank's share" in wrong.pop("OwnClassWeights")
    assert not wrong
    assert list(blamed) == ["Dropping"], blamed


@pytest.mark.slow
def test_in_bf16_all_are_found_that_change_more_than_it_rounds_though_clipping_looks_like_a_scale(tmp_path):
    faults = [replace(fault, ranks=2) for fault in FAULTS if fault.loop is not SwappedStages]
    found = run_all(tmp_path, faults, bf16=True)
    missed = {each.fault.loop: each.found for each in found if not each.is_found}
    assert set(missed) <= {CompressedGradients, LossWithState}
    assert all("within 5 %, which rounding in bfloat16 may" in each.detail for each in missed.values())
    assert {each.fault.loop for each in found if not each.is_right} <= {ClippedFirst, *missed}


@pytest.mark.slow
def test_mistakes_are_found_that_the_diagnosis_was_not_made_for(tmp_path):
    found = {each.fault.loop.__name__: each for each in run_all(tmp_path, UNFORESEEN)}
    assert {name: each.found.cause for name, each in found.items()} == {
        name: each.fault.cause for name, each in found.items()
    }


def cannot_happen_with_ddp(loop):
    """DistributedDataParallel reduces and broadcasts by itself, and takes a whole model."""
    return bool({"reduce", "broadcast"} & set(vars(loop))) or loop in (
        SkippedOnOneRank,
        SwappedStages,
        TiedWeightTwice,
        ReducedEarly,
        OptimizerOfAnotherModel,
        OverflowOnOneRank,
        EmaOnRank0,
    )


def test_there_are_the_twenty_faults_that_were_asked_for():
    assert len(FAULTS) >= 20
    assert len({fault.loop for fault in FAULTS}) == len(FAULTS)
