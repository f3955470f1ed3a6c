"""A job: typed settings that check themselves and travel as JSON."""

import dataclasses

import pytest

from lockstep.config.components import Component
from lockstep.config.job import DataConfig, JobConfig, RunConfig, ScheduleConfig, TrainingConfig
from lockstep.errors import ConfigError


def job(**changes):
    settings = {
        "model": Component(target="a.b:Net", args={"depths": [2, 3], "block": {"object": "a.b:Block"}}),
        "data": DataConfig(train=Component(target="a.b:Set")),
        "optimizer": Component(target="torch.optim:SGD", args={"lr": 0.1, "nesterov": True}),
    }
    return JobConfig(**{**settings, **changes})


def test_a_job_comes_back_equal_from_json():
    full = job(
        job="wide",
        code=("/one", "/two"),
        data=DataConfig(train=Component(target="a:b"), validation=Component(target="c:d"), root="/data"),
        schedule=Component(target="torch.optim.lr_scheduler:StepLR", args={"step_size": 3}),
        training=TrainingConfig(clip_norm=0.5, evaluation_batch=7, seed=2**40),
        run=RunConfig(devices="0,5"),
    )
    for one in (job(), full):
        assert JobConfig.from_json(one.to_json()) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', "null", "[" * 5000])
def test_text_that_is_no_job_is_refused(text):
    with pytest.raises(ConfigError):
        JobConfig.from_json(text)


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        job().training.epochs = 3


def test_all_that_is_wrong_with_a_table_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(epochs=0, precision="fp61", clip_norm=-1.0, seed=-1)
    for part in (
        "epochs should be at least 1",
        "'fp16'",
        "clip_norm should be more than 0",
        "seed should be",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("devices", [1, 8, "auto", "cpu", "cpu:3", "4", "0,5", "5,"])
def test_devices_are_a_number_a_word_or_a_list(devices):
    assert RunConfig(devices=devices).devices == devices


@pytest.mark.parametrize("devices", [0, -1, "gpu", "cpu:0", "0", "1,,2", "", "cuda:1", "1;2"])
def test_other_devices_are_refused(devices):
    with pytest.raises(ConfigError, match="devices"):
        RunConfig(devices=devices)


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", "-x", ".hidden", "a b"])
def test_a_run_name_is_a_single_part_of_a_path(name):
    with pytest.raises(ConfigError, match="plain name"):
        RunConfig(name=name)


def test_a_job_of_the_longest_name_has_room_for_the_number_of_a_run():
    """A job of 97 letters or more was refused for the name of its run."""
    assert RunConfig(name=job(job="x" * 100).job + "-001")
    with pytest.raises(ConfigError, match="at most 120 bytes"):
        RunConfig(name="x" * 121)


@pytest.mark.parametrize(
    "target",
    ["", "resnet18", "a:", ":b", "a b:c", "a:b c", "a.:b", "a..b:c", "../a:b", "a:b()", "1a:b", "a:b:c"],
)
def test_a_target_that_is_no_import_path_is_refused(target):
    with pytest.raises(ConfigError, match=r"package\.module:name"):
        Component(target=target)


def test_a_dotted_path_is_answered_with_the_colon_in_its_place():
    with pytest.raises(ConfigError, match=r"Did you mean 'torchvision\.models:resnet34'\?"):
        Component(target="torchvision.models.resnet34")


def test_epochs_of_the_schedule_become_optimizer_steps():
    settings = ScheduleConfig(kind="step", warmup_epochs=0.5, step_epochs=2.0)
    schedule = settings.schedule(steps=70, steps_per_epoch=7)
    assert (schedule.steps, schedule.warmup_steps, schedule.step_every) == (70, 4, 14)
    assert ScheduleConfig(warmup_steps=9).schedule(steps=3, steps_per_epoch=3).warmup_steps == 9


def test_the_options_of_the_run_come_from_the_tables(load):
    job = load("run.threads=2", "run.timeout=9", "data.timeout=7", "checkpoint.keep=5", "checkpoint.background=false")
    options = job.run_options("runs/1", profile="1:2")
    assert (options.threads, options.timeout, options.loader_timeout) == (2, 9.0, 7.0)
    assert (options.keep, options.save_in_background) == (5, False)
    assert (options.fingerprint_every, options.global_batch) == (50, 128)
    assert (options.directory, options.profile) == ("runs/1", "1:2")


@pytest.mark.parametrize(
    ("asked", "cores", "threads", "ranks", "found"),
    [("auto", 8, 1, 2, 3), ("auto", 64, 2, 4, 8), ("auto", 2, 1, 4, 1), (5, 2, 1, 4, 5), (0, 8, 1, 1, 0)],
)
def test_workers_are_a_number_or_what_the_cores_of_a_host_leave(load, monkeypatch, asked, cores, threads, ranks, found):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert load(f"data.workers={asked}").data.loader_processes(threads, ranks) == found


@pytest.mark.parametrize("asked", ["-1", "many", "true"])
def test_workers_that_are_neither_are_refused(load, asked):
    with pytest.raises(ConfigError, match=r"data\.workers should be"):
        load(f"data.workers={asked}")
