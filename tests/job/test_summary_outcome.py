"""The last lines of a run."""

import pytest

from lockstep.job.summary import describe_outcome
from lockstep.trainer import TrainingOutcome


def outcome(**values):
    return TrainingOutcome(
        **{
            "fingerprint": "ab12",
            "values": {},
            "best": None,
            "best_epoch": -1,
            "metric": "validation_loss",
            "samples_per_second": 0.0,
            "seconds": 0.0,
            "weights": None,
            "skipped_steps": 0,
            **values,
        }
    )


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (840, "840 B"),
        (153_690.4, "154 kB"),
        (1_234_567, "1.23 MB"),
        (98_765_432_100, "98.8 GB"),
    ],
)
def test_what_a_rank_sends_in_a_step_is_shown(sent, shown):
    lines = describe_outcome(outcome(bytes_per_step=sent), "").splitlines()
    assert f"sent         at most {shown} per step and rank" in lines


def test_one_process_sends_nothing_and_says_nothing_of_it():
    assert "sent" not in describe_outcome(outcome(), "lockstep train digits --devices 2")


@pytest.mark.parametrize(("on_device", "shown"), [(False, "resident in a process"), (True, "allocated on a device")])
def test_the_peak_of_memory_is_shown(on_device, shown):
    lines = describe_outcome(outcome(peak_memory=1_234_000_000, is_memory_of_device=on_device), "").splitlines()
    assert f"memory       at most 1.23 GB {shown}" in lines


def test_a_proof_is_offered_where_there_is_one():
    assert "prove it     lockstep train" in describe_outcome(outcome(), "lockstep train digits --devices 2")
    assert "prove it" not in describe_outcome(outcome(), "")


@pytest.mark.parametrize(("skipped", "shown"), [(1, "1 step whose"), (2, "2 steps whose")])
def test_skipped_steps_are_counted(skipped, shown):
    assert f"skipped      {shown} scaled gradients overflowed" in describe_outcome(outcome(skipped_steps=skipped), "")


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        ("validation_accuracy", "accuracy     50.00 % on the validation set (best 75.00 %, epoch 2)"),
        ("validation_loss", "loss         0.5 on the validation set (best 0.75, epoch 2)"),
    ],
)
def test_the_last_evaluation_and_the_best_are_shown(metric, shown):
    lines = describe_outcome(outcome(metric=metric, values={metric: 0.5}, best=0.75, best_epoch=1), "").splitlines()
    assert shown in lines


def test_an_accuracy_that_is_given_in_percent_is_not_multiplied():
    metric = "validation_accuracy"
    for last, shown in ((43.24, "43.24"), (0.5, "0.5")):
        found = outcome(metric=metric, values={metric: last}, best=45.0, best_epoch=1)
        assert (
            f"accuracy     {shown} on the validation set (best 45, epoch 2)" in describe_outcome(found, "").splitlines()
        )


def test_no_evaluation_is_the_best_where_all_are_nan():
    metric, nan = "validation_loss", float("nan")
    found = outcome(metric=metric, values={metric: nan}, best=nan, best_epoch=0)
    assert "loss         nan on the validation set" in describe_outcome(found, "").splitlines()


@pytest.mark.parametrize(("first", "shown"), [(0, "2.5 s of training"), (1200, "2.5 s of training since step 1,200")])
def test_the_time_of_a_resumed_run_is_said_to_be_that_of_its_last_start(first, shown):
    lines = describe_outcome(outcome(samples_per_second=400.0, seconds=2.5, first_step=first), "").splitlines()
    assert f"speed        400 samples/s, {shown}" in lines
