"""The step from which a replay begins: run folders with checkpoints, starts and holes in them."""

import dataclasses

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.config.components import Component
from lockstep.config.job import CheckpointConfig, DataConfig, JobConfig, RunConfig, TrainingConfig
from lockstep.core.plan import Share
from lockstep.errors import ConfigError
from lockstep.job.run_folder import FILE, Start, with_start
from lockstep.replay import find_origin, single_process_config

PART = Component(target="torch.nn:Identity")
JOB = JobConfig(model=PART, data=DataConfig(train=PART), optimizer=Component(target="x:y", args={"lr": 0.1}))


def start(step, job=JOB, ranks=2, **changes):
    values = {"strategy": "ddp", "level": "A", "device": "cpu", "context": {"threads": 1}}
    values["shares"] = [Share(holders=ranks, holder=rank) for rank in range(ranks)]
    return Start(step=step, job=job, **{**values, **changes})


def resumed_from(path, job=JOB):
    return dataclasses.replace(job, checkpoint=CheckpointConfig(resume=str(path)))


@pytest.fixture
def folder(tmp_path):
    """Makes a run folder of starts and steps of checkpoints."""

    def make(starts, checkpoints, name="run"):
        made = tmp_path / name
        made.mkdir()
        text, known = "", []
        for each in starts:
            text = with_start(known, each)
            known.append(each)
        (made / FILE).write_text(text)
        for step in checkpoints:
            checkpoint.write(made, CheckpointState({"w": torch.ones(3)}, {}, {}), step=step)
        return made

    return make


@pytest.mark.parametrize(
    ("step", "first", "name"),
    [
        (11, 0, None),
        (12, 12, "step-00000012"),
        (17, 12, "step-00000012"),
        (99, 24, "step-00000024"),
    ],
)
def test_the_nearest_checkpoint_at_or_before_the_step_is_taken_or_else_the_seed(folder, step, first, name):
    origin = find_origin(folder([start(0)], [12, 24]), step)
    assert origin.step == first
    assert (origin.checkpoint.name if origin.checkpoint else None) == name


def test_a_broken_checkpoint_is_skipped_with_a_warning(folder, caplog):
    run = folder([start(0)], [12, 24])
    (run / "step-00000024" / "model.safetensors").write_bytes(b"")
    assert find_origin(run, 30).step == 12
    assert "step-00000024" in caplog.text


def test_a_step_belongs_to_the_last_start_before_it(folder):
    other = dataclasses.replace(JOB, training=TrainingConfig(epochs=99))
    run = folder([start(0), start(12, other, ranks=4)], [12])
    assert find_origin(run, 11).start.ranks == 2
    assert find_origin(run, 12).start.ranks == 4
    assert find_origin(run, 12).start.job.training.epochs == 99


def test_another_layout_may_be_crossed_and_other_settings_may_not(folder):
    moved = dataclasses.replace(JOB, training=TrainingConfig(strategy="fsdp"), run=RunConfig(devices="cpu:4", name="x"))
    assert find_origin(folder([start(0), start(12, moved)], [], "moved"), 14).step == 0
    slower = dataclasses.replace(JOB, optimizer=Component(target="x:y", args={"lr": 0.01}))
    with pytest.raises(ConfigError, match="resumed with other settings at step 12"):
        find_origin(folder([start(0), start(12, slower)], [6], "slower"), 14)
    with pytest.raises(ConfigError, match="resumed with other settings at step 12"):
        find_origin(folder([start(0), start(12, context={"threads": 2})], [6], "threads"), 14)


@pytest.mark.parametrize(
    "changes", [{"prefetch": 1}, {"cache": "cache"}, {"workers": 2}, {"timeout": 9.0}, {"root": "moved"}]
)
def test_other_settings_of_reading_and_other_checks_may_be_crossed(folder, changes):
    """``--set data.prefetch=1`` at a resume left no step behind it that could be computed."""
    training = dataclasses.replace(JOB.training, checks="always")
    other = dataclasses.replace(JOB, data=dataclasses.replace(JOB.data, **changes), training=training)
    assert find_origin(folder([start(0), start(12, other)], []), 14).step == 0


def test_the_code_of_another_place_may_not_be_crossed(folder):
    other = dataclasses.replace(JOB, code=("elsewhere",))
    with pytest.raises(ConfigError, match="resumed with other settings at step 12"):
        find_origin(folder([start(0), start(12, other)], [6]), 14)


def test_a_run_that_went_on_from_another_begins_with_its_checkpoint(folder):
    first = folder([start(0)], [12], "first")
    run = folder([start(12, resumed_from(first / "step-00000012"))], [24], "second")
    assert find_origin(run, 14).checkpoint == first / "step-00000012"
    assert find_origin(run, 24).checkpoint == run / "step-00000024"
    with pytest.raises(ConfigError, match="resumed from step 12 of another run"):
        find_origin(run, 3)


def test_where_nothing_is_left_to_begin_with_the_checkpoints_are_told(folder, tmp_path):
    run = folder([start(12, resumed_from(tmp_path / "gone"))], [24, 36])
    with pytest.raises(ConfigError, match=r"has no checkpoint at or before step 14 \(its steps: 24, 36\)"):
        find_origin(run, 14)


def test_mistakes_are_said_in_a_sentence(folder, tmp_path):
    with pytest.raises(ConfigError, match="There is no run folder"):
        find_origin(tmp_path / "nowhere", 0)
    with pytest.raises(ConfigError, match=r"holds no job.json"):
        find_origin(tmp_path, 0)
    run = folder([start(0)], [])
    with pytest.raises(ConfigError, match="steps are counted from 0"):
        find_origin(run, -1)
    for text in ("{}", "[]", "torn {", '{"starts": [3]}', '{"starts": []}'):
        (run / FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"is not what 'lockstep train' wrote"):
            find_origin(run, 0)


def test_a_start_that_goes_back_replaces_those_after_it(folder):
    run = folder([start(0), start(24), start(12, ranks=7)], [])
    assert find_origin(run, 30).start.ranks == 7


def test_the_job_alone_is_the_same_recipe_and_writes_nothing():
    job = dataclasses.replace(
        JOB,
        training=TrainingConfig(strategy="hybrid", mesh="data=2,pipeline=2", seed=7, precision="bf16"),
        run=RunConfig(threads=3, directory="elsewhere", name="x"),
    )
    found = single_process_config(job, resume="step-00000012", force_context=True)
    assert (found.training.strategy, found.training.mesh) == ("single", "")
    assert (found.training.seed, found.training.precision, found.run.threads) == (7, "bf16", 3)
    assert (found.checkpoint.resume, found.checkpoint.force_context) == ("step-00000012", True)
    assert not (found.log.json or found.log.tensorboard or found.log.progress)
    assert (found.model, found.optimizer, found.data.workers) == (job.model, job.optimizer, 0)
