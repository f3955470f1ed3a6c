"""Options of a strategy that was not chosen are named once, and are no mistake."""

import logging

import pytest

import lockstep
from lockstep.config.job import ScheduleConfig
from lockstep.config.options import unused_options
from lockstep.run import RunOptions


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({}, []),
        ({"strategy": "fsdp", "fsdp": {"reshard_after_forward": False}}, []),
        ({"fsdp": {"reshard_after_forward": True}}, []),
        ({"strategy": "single", "tensor": {"shards": 2, "plan": ["fc=column"]}}, []),
        ({"strategy": "single", "tensor": {"plan": ["fc=column"]}}, ["tensor"]),
        ({"fsdp": {"reshard_after_forward": False}, "dp": {"replicas": 3}}, ["dp", "fsdp"]),
        (
            {
                "strategy": "hybrid",
                "mesh": "data=2,pipeline=2",
                "pipeline": {"schedule": "gpipe"},
                "tensor": {"plan": ["fc=column"]},
            },
            ["tensor"],
        ),
    ],
)
def test_what_is_set_for_another_strategy_is_found(options, unused):
    found = unused_options(RunOptions.of(global_batch=8, **options))
    assert [name.partition(".")[0] for name in found] == unused


def test_settings_of_schedules_of_another_kind_are_found():
    of_all = {"final_factor": 0.5, "step_epochs": 2.0, "step_factor": 0.5}
    assert ScheduleConfig(kind="constant", **of_all).unused == [*of_all]
    assert ScheduleConfig(kind="linear", **of_all).unused == ["step_epochs", "step_factor"]
    assert ScheduleConfig(kind="step", **of_all).unused == ["final_factor"]
    assert ScheduleConfig(kind="step").unused == []


def test_a_rank_of_powersgd_is_for_powersgd(caplog):
    with caplog.at_level(logging.WARNING, "lockstep"):
        lockstep.init(global_batch=8, powersgd_rank=2).close()
    assert caplog.messages == ["reduce 'ordered' does not use powersgd_rank."]


def test_a_run_says_it_in_one_line(caplog):
    with caplog.at_level(logging.WARNING, "lockstep"):
        run = lockstep.init(global_batch=8, strategy="ddp", fsdp={"cpu_offload": True}, dp={"replicas": 2})
    run.close()
    assert caplog.messages == ["Strategy 'ddp' does not use what is set for others: dp.replicas, fsdp.cpu_offload."]
