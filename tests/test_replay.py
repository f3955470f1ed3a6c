"""A step of a run on one process, recomputed in this process."""

import pytest

from lockstep.config.job_file import parse_set
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.job import load_job
from lockstep.job.assemble import assemble
from lockstep.job.rank import record
from lockstep.job.run_folder import choose_run_folder, run_folder
from lockstep.replay import ReplayRequest, find_origin, replay

SETTINGS = (
    *(
        "run.name=run",
        "training.epochs=1",
        "training.max_steps=9",
        "schedule.warmup_epochs=0",
        "training.gradients_every=1",
        "training.record_micro_batches=true",
    ),
    *(
        "training.strategy=single",
        "run.devices=1",
        "data.workers=0",
        "log.tensorboard=false",
        "log.progress=false",
    ),
)


def trained(runs, *more):
    """The folder of a run of the digits job."""
    settings = [parse_set(text) for text in (f"run.directory={runs}", *SETTINGS, *more)]
    config = choose_run_folder(load_job("digits", settings))
    trainer = assemble(config, World())
    record(trainer, config, run_folder(config))
    trainer.fit()
    return runs / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"))


def replayed(folder, **request):
    return replay(ReplayRequest(folder=folder, **request), find_origin(folder, request["step"]))


def test_the_gradient_of_a_step_has_the_recorded_bits(folder):
    paused = []
    report = replayed(folder, step=2, pause=lambda: paused.append(True))
    assert not report.differs and report.compared.recorded is not None
    assert [each.step for each in report.earlier] == [0, 1]
    assert len(paused) == 1


def test_the_gradient_of_a_micro_batch_has_the_recorded_bits(folder):
    report = replayed(folder, step=1, micro_batch=3)
    assert not report.differs and report.compared.recorded is not None
    assert len(report.samples) * report.leaves == len(replayed(folder, step=1).samples)


@pytest.mark.slow
def test_a_run_whose_layers_are_in_shards_is_computed_in_shards_again(tmp_path):
    """It was refused for other conditions, since the table ``[tensor]`` was left out, as those of layouts are."""
    settings = ("tensor.shards=2", "training.record_micro_batches=false", "training.max_steps=2")
    report = replayed(trained(tmp_path, *settings), step=1)
    assert not report.differs and report.compared.recorded is not None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"step": 9}, r"Step 9 does not exist: the steps of the run are 0 to 8\."),
        ({"step": 0, "micro_batch": 99}, r"the micro-batches of a step are 0 to \d+\."),
    ],
)
def test_a_step_or_micro_batch_that_does_not_exist_is_refused(folder, request_, message):
    with pytest.raises(ConfigError, match=message):
        replayed(folder, **request_)
