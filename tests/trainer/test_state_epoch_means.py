"""Logged losses and accuracies are exact: sums over weights, whenever they are read and wherever a run stopped."""

import json
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_ranks
from tests.trainer.test_trainer import records, trainer
from torch import nn

from lockstep.core.world import World
from lockstep.loggers import MultiLogger
from lockstep.runtime import Callback
from lockstep.runtime.control import Stopped, StopReason
from lockstep.strategies import Single
from lockstep.trainer import Accuracy, Meter

EPOCHS, STEPS, SAMPLES = 2, 4, 60


def take(meter, losses, weight, right):
    """One step with the loss sums of its micro-batches, and answers of which some are right."""
    result = SimpleNamespace(losses=torch.tensor(losses).double(), weight=torch.tensor(float(weight)).double())
    output = torch.eye(2)[[0] * len(right)]
    meter.on_output(None, output, torch.tensor([0 if each else 1 for each in right]))
    meter.on_backward_end(SimpleNamespace(plan=SimpleNamespace(samples=len(right))), result)


STEPS_BY_HAND = [([1.0, 2.5], 4, [1, 0, 0, 1]), ([0.25, 0.5], 3, [1, 1, 1]), ([4.0], 1, [0])]


def meter():
    return Meter(Single(torch.device("cpu"), 1), Accuracy())


def test_the_means_of_an_epoch_are_sums_over_weights_whenever_they_are_read():
    for read_after in ((), (0,), (1,), (0, 1), (0, 1, 2)):
        found = meter()
        found.begin(0)
        for number, step in enumerate(STEPS_BY_HAND):
            take(found, *step)
            if number in read_after:
                found.read()
        found.collect()
        means = found.means()
        assert (means["loss"], means["accuracy"]) == (8.25 / 8, 5 / 8), read_after


def test_a_reading_holds_the_steps_since_the_last_one_over_a_stop():
    found = meter()
    found.begin(3)
    take(found, *STEPS_BY_HAND[0])
    assert found.read()["loss"] == 3.5 / 4
    take(found, *STEPS_BY_HAND[1])
    found.collect()
    resumed = meter()
    resumed.begin(3, json.loads(json.dumps(found.as_dict())))
    take(resumed, *STEPS_BY_HAND[2])
    reading = resumed.read()
    assert (reading["loss"], reading["accuracy"]) == (4.75 / 4, 3 / 4)
    assert (resumed.means()["loss"], resumed.means()["accuracy"]) == (8.25 / 8, 5 / 8)


def test_what_another_epoch_has_left_is_not_taken_up():
    found = meter()
    found.begin(2)
    take(found, *STEPS_BY_HAND[0])
    found.collect()
    after = meter()
    after.begin(3, found.as_dict())
    assert after.means() == {}


def test_the_means_of_readings_that_an_earlier_version_kept_are_not_taken_for_sums(caplog):
    found = meter()
    found.begin(1, {"epoch": 1, "count": 2, "sums": {"loss": 4.5, "accuracy": 0.5}})
    take(found, *STEPS_BY_HAND[0])
    found.collect()
    assert found.means()["loss"] == 3.5 / 4
    assert "loss and accuracy of epoch 2 are those of the steps from here on" in caplog.text


def losses_by_hand(folder):
    """Trains; gives what the log should hold for each epoch, from the outputs of its steps."""
    job, seen = trainer(World(), folder, log_every=3, epochs=EPOCHS), []

    class Outputs(Callback):
        def on_output(self, micro_batch, output, target):
            each = nn.functional.cross_entropy(output.detach().double(), target, reduction="none")
            seen.append((each, output.detach().argmax(1) == target))

    job.run.add_callback(Outputs())
    job.fit()
    assert sum(len(each) for each, _ in seen) == EPOCHS * SAMPLES
    samples = [torch.cat(each) for each in zip(*seen)]
    return [
        (float(losses.mean()), Fraction(int(right.sum()), SAMPLES))
        for losses, right in zip(*(each.split(SAMPLES) for each in samples))
    ]


def logged(folder, kind):
    return [
        {name: value for name, value in record.items() if name not in ("samples_per_second", "seconds", "kind")}
        for record in records(folder)
        if record["kind"] == kind
    ]


def test_the_log_of_an_epoch_is_what_its_outputs_give_by_hand_for_every_interval(tmp_path):
    wanted = losses_by_hand(tmp_path / "by hand")
    of_epochs = logged(tmp_path / "by hand", "epoch")
    for record, (loss, accuracy) in zip(of_epochs, wanted, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-6)
        assert record["accuracy"] == float(accuracy)
    for log_every in (1, 2, 1000):
        trainer(World(), tmp_path / f"{log_every}", log_every=log_every, epochs=EPOCHS).fit()
        assert logged(tmp_path / f"{log_every}", "epoch") == of_epochs


class Bar(MultiLogger):
    """Notes what a progress bar is told of the epoch so far, by step."""

    def __init__(self, job):
        super().__init__([job._logger])
        self.shown = {}
        job._logger = self

    def log(self, step, values, so_far=None):
        super().log(step, values, so_far)
        self.shown[step] = so_far["loss"], so_far["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 6])
def test_a_stop_within_an_epoch_changes_no_record_and_nothing_in_the_progress_bar(tmp_path, step):
    job = trainer(World(), tmp_path / "whole", log_every=3, epochs=EPOCHS)
    whole = Bar(job).shown
    job.fit()
    for number, record in enumerate(logged(tmp_path / "whole", "epoch")):
        assert whole[STEPS * (number + 1)] == (record["loss"], record["accuracy"])
    assert sorted(whole) == [3, 4, 6, 8]
    job = trainer(World(), tmp_path / "cut", log_every=3, epochs=EPOCHS)
    before = Bar(job).shown
    train_step = job.train_step

    def asked_to_stop(batch):
        if batch.plan.step + 1 == step:
            job.run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)
        return train_step(batch)

    job.train_step = asked_to_stop
    with pytest.raises(Stopped):
        job.fit()
    job._logger.close()
    job.run.close()
    job = trainer(World(), tmp_path / "cut", log_every=3, epochs=EPOCHS, resume="auto")
    after = Bar(job).shown
    job.fit()
    assert {**before, **after} == whole
    for kind in ("step", "epoch"):
        assert logged(tmp_path / "cut", kind) == logged(tmp_path / "whole", kind)


def test_a_record_of_a_step_has_the_learning_rate_that_the_step_was_made_with(tmp_path):
    trainer(World(), tmp_path, lr=0.1, log_every=2, epochs=EPOCHS).fit()
    rates = {record["step"]: record["learning_rate"] for record in logged(tmp_path, "step")}
    assert rates == {2: 0.1, 4: 0.1, 6: 0.05, 8: 0.05}  # halved after every fifth step


def test_groups_with_rates_of_their_own_and_the_loss_scale_are_named(tmp_path):
    job = trainer(World(), tmp_path, epochs=1, precision="fp16", groups=True)
    job.fit()
    record = logged(tmp_path, "step")[0]
    assert (record["learning_rate_1"], record["learning_rate_2"]) == (0.1, 0.02)
    assert record["loss_scale"] == 2.0**14
    assert "learning_rate" not in record


def test_groups_whose_rates_meet_keep_their_names(tmp_path):
    """The curve of each ended there, and a comparison showed the rates of an earlier step as the last ones."""
    job = trainer(World(), tmp_path)
    found = []
    for rates in ([0.1, 0.1], [0.1, 0.02], [0.02, 0.02]):
        job._learning_rates = rates
        found.append(job._read())
    assert found == [
        {"learning_rate": 0.1},
        {"learning_rate_1": 0.1, "learning_rate_2": 0.02},
        {"learning_rate_1": 0.02, "learning_rate_2": 0.02},
    ]


def sent(world, folder, checks):
    """The bytes that are counted as sent, per step and in all."""
    job = trainer(world, folder / checks, epochs=1, checks=checks)
    job.fit()
    return job._most_of_a_rank()[0], job.run.strategy.all_bytes_sent


def test_what_the_rehearsals_of_the_first_steps_compute_and_send_is_in_no_number(tmp_path):
    off, first = [run_ranks(sent, 2, tmp_path, checks)[0] for checks in ("off", "first")]
    assert first[1] > off[1], "they send nothing, so the test shows nothing"
    assert first[0] == off[0]
    assert logged(tmp_path / "first", "step") == logged(tmp_path / "off", "step")
    assert logged(tmp_path / "first", "epoch") == logged(tmp_path / "off", "epoch")


def epochs_of(world, folder, layout):
    """The records of the epochs of a run, on the main process."""
    job = trainer(world, folder, layout=layout)
    job.fit()
    return [each for each in records(folder) if each["kind"] == "epoch"] if world.is_main else []


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_accuracy_of_an_epoch_counts_all_that_independent_workers_answered(tmp_path, world_size):
    """The server logged what had come by then: the last answers of an epoch were counted in the next one."""
    options = {"mode": "asynchronous", "staleness": 0}
    strategy = {"strategy": "parameter_server", "parameter_server": options}
    (alone,) = run_ranks(epochs_of, 1, tmp_path / "alone", {})
    found = run_ranks(epochs_of, world_size, tmp_path / "server", strategy)[0]
    assert [each["accuracy"] for each in found] == [each["accuracy"] for each in alone]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in alone], rel=1e-5)
