import json
import logging
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import checkpoint
from lockstep.config.job import CheckpointConfig, TrainingConfig
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.loggers import open_loggers
from lockstep.run import Run, RunOptions
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.events import Callback
from lockstep.trainer import Accuracy, Trainer, TrainingParts


def blobs(seed, count=60):
    """Two classes that a line tells apart, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 2, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 3, generator=generator) + target[:, None], target)


def trainer(
    world,
    folder,
    *,
    lr=0.1,
    resume="",
    save_every_steps=0,
    save_every_epochs=1,
    log_every=2,
    groups=False,
    checks="first",
    layout=None,
    data=(0,),
    validation=1,
    **settings,
):
    settings = TrainingConfig(**{"epochs": 4, "global_batch": 16, "micro_batches": 4, **settings})
    options = {
        "global_batch": 16,
        "micro_batches": 4,
        "directory": folder,
        "resume": resume,
        "checks": checks,
        **(layout or {}),
    }
    run = Run(RunOptions.of(**options, precision=settings.precision), world)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    both = [{"params": [model.weight]}, {"params": [model.bias], "lr": lr / 5}]
    optimizer = torch.optim.SGD(both if groups else model.parameters(), lr=lr)
    model, optimizer, scheduler = run.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))
    parts = TrainingParts(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=nn.CrossEntropyLoss(),
        accuracy=Accuracy(),
        training_set=blobs(*data),
        validation_set=None if validation is None else blobs(validation),
        workers=0,
        judged=str(validation),
    )
    saving = CheckpointConfig(every_steps=save_every_steps, every_epochs=save_every_epochs)
    logger = open_loggers(world, folder, ["jsonl"], first_step=run.position.step)
    return Trainer(run, parts, settings, saving, log_every, logger)


def outcome(world, folder, options):
    result = trainer(world, folder, **options).fit()
    return result.fingerprint, result.values, result.best_epoch


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_result_and_log_are_the_same_on_three_ranks_and_on_one(tmp_path):
    (one,) = run_ranks(outcome, 1, tmp_path / "one", {})
    three = run_ranks(outcome, 3, tmp_path / "three", {})
    assert three == [one] * 3
    first, second = (
        [
            {key: value for key, value in record.items() if key not in ("samples_per_second", "seconds")}
            for record in records(folder)
        ]
        for folder in (tmp_path / "one", tmp_path / "three")
    )
    assert first == second
    assert [record["step"] for record in first if record["kind"] == "epoch"] == [4, 8, 12, 16]


def test_a_run_that_does_not_improve_stops_early_and_names_its_best(tmp_path):
    ((_, values, best_epoch),) = run_ranks(outcome, 1, tmp_path, {"lr": 0.0, "early_stop": 2, "epochs": 9})
    assert best_epoch == 0
    assert 0 < values["validation_accuracy"] < 1
    assert [record["epoch"] for record in records(tmp_path) if record["kind"] == "epoch"] == [0, 1, 2]
    assert checkpoint.read_best(tmp_path).step == 4
    assert (tmp_path / "step-00000004").is_dir()


def test_a_run_that_stops_early_within_an_epoch_logs_its_last_steps(tmp_path):
    """The loss of the steps since the last record stood in no record of kind step."""
    options = {"lr": 0.0, "early_stop": 1, "evaluate_every_steps": 1, "epochs": 9, "log_every": 10}
    run_ranks(outcome, 1, tmp_path, options)
    *_, step, evaluation, epoch = records(tmp_path)
    assert [each["step"] for each in (step, evaluation, epoch)] == [2, 2, 2]
    assert (step["loss"], step["accuracy"]) == (epoch["loss"], epoch["accuracy"])
    assert "learning_rate" in step and "validation_loss" in evaluation


def test_a_run_that_stops_early_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lockstep")
    trainer(World(), tmp_path, lr=0.0, early_stop=2, epochs=9).fit()
    assert "validation_accuracy has not improved in the last 2 evaluations" in caplog.text


@pytest.mark.parametrize("end", [{"epochs": 3}, {"epochs": 9, "max_steps": 12}])
def test_a_run_with_all_its_epochs_or_steps_has_not_ended_early(tmp_path, caplog, end):
    caplog.set_level(logging.INFO, logger="lockstep")
    trainer(World(), tmp_path, lr=0.0, early_stop=2, **end).fit()
    assert records(tmp_path)[-1]["step"] == 12
    assert "ends early" not in caplog.text


def test_the_speed_of_a_run_is_that_of_its_epochs(tmp_path):
    found = trainer(World(), tmp_path).fit()
    epochs = [each for each in records(tmp_path) if each["kind"] == "epoch"]
    samples = found.samples_per_second * found.seconds
    of_each = samples / len(epochs)
    assert found.seconds == pytest.approx(sum(of_each / epoch["samples_per_second"] for epoch in epochs))
    assert found.first_step == 0
    resumed = trainer(World(), tmp_path, epochs=5, resume="auto").fit()
    assert resumed.first_step == 16
    last = records(tmp_path)[-1]
    assert resumed.samples_per_second == pytest.approx(last["samples_per_second"])


@pytest.mark.parametrize("other", [None, 2])
def test_a_result_on_another_validation_set_is_not_that_of_a_resumed_run(tmp_path, other):
    """Without one, the record of its last step and its last lines had the accuracy of a step before the stop."""
    first = trainer(World(), tmp_path, epochs=2).fit()
    assert {"validation_loss", "validation_accuracy"} == first.values.keys()
    resumed = trainer(World(), tmp_path, epochs=2, resume="auto", validation=other).fit()
    assert resumed.values == {}, "no step is left, so nothing was evaluated on it"
    longer = trainer(World(), tmp_path, epochs=3, max_steps=10, resume="auto", validation=other).fit()
    last = records(tmp_path)[-1]
    assert (last["kind"], last["step"], last["epochs_done"]) == ("epoch", 10, 2.5)
    assert {name for name in last if name.startswith("validation_")} == longer.values.keys()
    if other is None:
        assert longer.values == {}
    else:
        inputs, target = blobs(other).tensors
        weights = load_file(longer.weights)
        answers = nn.functional.linear(inputs, weights["weight"], weights["bias"]).argmax(1)
        assert longer.values["validation_accuracy"] == int((answers == target).sum()) / len(target)


def test_the_last_epoch_is_evaluated_where_the_training_set_has_become_smaller(tmp_path):
    """It was found by the number of steps, and the last lines had the accuracy of the epoch before."""
    trainer(World(), tmp_path, epochs=2, evaluate_every=3).fit()  # 60 samples: 4 steps
    resumed = trainer(World(), tmp_path, epochs=4, evaluate_every=3, resume="auto", data=(0, 30)).fit()
    ends = [each for each in records(tmp_path) if each["kind"] == "epoch"]
    assert [each["step"] for each in ends] == [4, 8, 10, 12]
    assert ["validation_accuracy" in each for each in ends] == [False, True, True, True]
    assert ends[-1]["validation_accuracy"] == resumed.values["validation_accuracy"]
    trainer(World(), tmp_path, epochs=7, max_steps=13, resume="auto", data=(0, 30)).fit()
    assert records(tmp_path)[-1]["epochs_done"] == 4.5, "four epochs, and one step of two"


def test_a_run_that_had_stopped_early_does_not_go_on_when_resumed(tmp_path):
    options = {"lr": 0.0, "early_stop": 1, "epochs": 9}
    before = run_ranks(outcome, 1, tmp_path, options)
    assert run_ranks(outcome, 2, tmp_path, {**options, "resume": "auto"}) == before * 2


@pytest.mark.parametrize("end", [3, 5, 7])
def test_the_last_record_of_max_steps_counts_all_steps_of_its_epoch(tmp_path, end):
    """The steps after the last reading were left out; where there was none, there was no loss at all."""
    for log_every in (1, 2, 10):
        run_ranks(outcome, 1, tmp_path / str(log_every), {"max_steps": end, "log_every": log_every})
    each, some, none = (
        [record[name] for name in ("loss", "accuracy", "validation_loss", "epochs_done")]
        for log_every in (1, 2, 10)
        for record in records(tmp_path / str(log_every))[-1:]
    )
    assert each == some == none
    steps = [record["step"] for record in records(tmp_path / "10") if record["kind"] == "step"]
    assert steps == [*range(4, end, 4), end], "the steps since the last reading have a record, too"


def refused(world, folder, options):
    resumed = trainer(world, folder, resume="auto", **options)
    with pytest.raises(ConfigError) as raised:
        resumed.fit()
    resumed._logger.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [((0, 61), "The training set has 61 samples, and had 60 before"), ((3,), "not what the epoch before")],
)
def test_a_run_whose_training_set_has_changed_after_an_epoch_says_so_until_its_end(tmp_path, caplog, data, said):
    """It said nothing where the number had changed, and named a command that ends in another fingerprint."""
    assert not trainer(World(), tmp_path, epochs=1).fit().has_other_data
    assert trainer(World(), tmp_path, epochs=2, resume="auto", data=data).fit().has_other_data
    assert caplog.text.count(said) == 1
    assert trainer(World(), tmp_path, epochs=3, resume="auto", data=data).fit().has_other_data
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize(("name", "most", "done"), [("epochs", 2, 3), ("max_steps", 9, 10)])
def test_a_run_that_has_trained_longer_than_it_should_is_not_resumed(tmp_path, name, most, done):
    """With fewer ``max_steps`` it trained on to the last epoch; with fewer epochs it had the result of all."""
    run_ranks(outcome, 1, tmp_path, {"max_steps": 10})
    (said,) = run_ranks(refused, 1, tmp_path, {name: most})
    assert f"The checkpoint has step 10, of epoch 3, and training.{name} is {most}" in said
    assert f"Set training.{name} to {done} or more" in said


def interrupted(world, folder):
    """Trains an epoch and a half, as if killed in the second one, then again from its last checkpoint."""
    first = trainer(world, folder, save_every_steps=3)
    step, steps = first.train_step, []

    def stop_after_seven(batch):
        step(batch)
        steps.append(batch)
        if len(steps) == 7:
            raise KeyboardInterrupt

    first.train_step = stop_after_seven
    try:
        first.fit()
    except KeyboardInterrupt:
        first._logger.close()


def test_a_run_cut_off_within_an_epoch_ends_as_if_it_had_not_been(tmp_path):
    (whole,) = run_ranks(outcome, 1, tmp_path / "whole", {})
    run_ranks(interrupted, 2, tmp_path / "cut")
    resumed = run_ranks(outcome, 4, tmp_path / "cut", {"resume": "auto"})
    assert resumed == [whole] * 4
    steps = [record["step"] for record in records(tmp_path / "cut") if record["kind"] == "step"]
    assert steps == sorted(set(steps))


def test_evaluations_and_checkpoints_every_n_steps_are_made_at_the_end_of_an_epoch_too(tmp_path):
    """With 4 steps an epoch, every 4 steps was never, where the epochs had none of their own."""
    options = {"evaluate_every": 9, "evaluate_every_steps": 4, "save_every_steps": 4, "save_every_epochs": 0}
    run_ranks(outcome, 1, tmp_path, options)
    evaluated = [record["step"] for record in records(tmp_path) if "validation_loss" in record]
    assert evaluated == [4, 8, 12, 16]
    assert len(list(tmp_path.glob("step-*"))) == 3  # checkpoint.keep, and the best may be among them


@pytest.mark.parametrize(
    ("options", "end"), [({"max_steps": 8, "evaluate_every": 3}, 8), ({"lr": 0.0, "early_stop": 1}, 8)]
)
def test_a_run_that_ends_early_at_the_end_of_an_epoch_is_evaluated_and_saved(options, end, tmp_path):
    """max_steps that ended an epoch left out the evaluation, and both left out the checkpoint at the end of the run."""
    run_ranks(outcome, 1, tmp_path, {"save_every_epochs": 0, **options})
    last = records(tmp_path)[-1]
    assert (last["step"], last["kind"]) == (end, "epoch")
    assert "validation_loss" in last
    assert (tmp_path / f"step-{end:08}").is_dir()


def slow_evaluations(world, folder):
    found = trainer(world, folder, evaluate_every_steps=1, epochs=1, log_every=1)
    evaluate, slept = found._evaluate, []

    def slowly(**options):
        slept.append(0.5)
        time.sleep(slept[-1])
        return evaluate(**options)

    found._evaluate = slowly
    began = time.perf_counter()
    seconds = found.fit().seconds
    return seconds, time.perf_counter() - began - sum(slept)


def test_the_time_of_evaluations_within_an_epoch_is_no_time_of_training(tmp_path):
    """Samples per second, and the seconds of training, counted evaluations every n steps, and not those of epochs."""
    ((seconds, awake),) = run_ranks(slow_evaluations, 1, tmp_path)
    (epoch,) = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    speeds = [record["samples_per_second"] for record in records(tmp_path) if "samples_per_second" in record]
    assert seconds < awake
    assert epoch["samples_per_second"] > 60 / awake
    assert min(speeds) > 16 / awake


class SlowLogger:
    """Takes long for each record, as the import of TensorBoard does for the first."""

    def __init__(self):
        self.slept = 0.0
        self.readings = []

    def log(self, step, values, so_far=None):
        time.sleep(0.5)
        self.slept += 0.5
        self.readings.append(values["samples_per_second"])

    def begin(self, *args, **options):
        pass

    epoch = close = begin


def test_the_time_of_logs_is_no_time_of_training(tmp_path):
    """The first record of a job imports TensorBoard, and that time was one of the steps after it."""
    found = trainer(World(), tmp_path, epochs=1, log_every=1)
    found._logger = slow = SlowLogger()
    began = time.perf_counter()
    seconds = found.fit().seconds
    awake = time.perf_counter() - began - slow.slept
    assert len(slow.readings) == 4
    assert seconds < awake
    assert min(slow.readings) > 12 / awake


def test_a_run_that_ends_within_an_epoch_says_how_many_epochs_it_has_made(tmp_path):
    run_ranks(outcome, 1, tmp_path, {"max_steps": 6})
    ends = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    assert [(record["step"], record.get("epochs_done")) for record in ends] == [(4, None), (6, 1.5)]


def exported(world, folder):
    trainer(world, folder).fit()


def test_the_exported_weights_load_into_the_plain_model(tmp_path):
    import safetensors.torch

    run_ranks(exported, 2, tmp_path)
    model = nn.Linear(3, 2)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    newest = checkpoint.read_newest(tmp_path).state
    assert all(torch.equal(newest.model[name], value) for name, value in model.state_dict().items())


def stopped_at(world, folder, step, options):
    job = trainer(world, folder, **options)

    class Stopping(Callback):
        def on_step_begin(self, batch):
            if batch.plan.step == step:
                job.run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)

    job.run.add_callback(Stopping())
    try:
        job.fit()
    except Stopped:
        job._logger.close()
        job.run.close()
        return True
    return False


def test_a_run_that_was_stopped_at_the_last_of_max_steps_evaluates_when_it_is_resumed(tmp_path):
    """Four steps are an epoch. It ended with the results of the epoch before, and without the last record."""
    options = {"max_steps": 8}
    (whole,) = run_ranks(outcome, 1, tmp_path / "whole", options)
    assert run_ranks(stopped_at, 1, tmp_path / "cut", 7, options) == [True]
    assert run_ranks(outcome, 2, tmp_path / "cut", {**options, "resume": "auto"}) == [whole] * 2
    ends = [record["step"] for record in records(tmp_path / "cut") if record["kind"] == "epoch"]
    assert ends == [4, 8]
