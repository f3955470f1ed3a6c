import os
import sys

import pytest

from lockstep.loggers import MultiLogger, TensorBoard


def scalars(directory):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_a_resumed_run_shows_every_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    first.begin(0, epochs=1, start=0, steps=4)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path, first_step=2)
    for step in (3, 4, 5):
        second.log(step, {"loss": 10.0 * step})
    second.epoch(0, 5, {"accuracy": 0.75})
    second.close()
    assert scalars(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)],
        "epoch/accuracy": [(5, 0.75)],
    }


def test_a_run_that_begins_anew_hides_what_one_without_a_checkpoint_has_written(tmp_path):
    pytest.importorskip("tensorboard")
    for loss in (1.0, 2.0):
        logger = TensorBoard(tmp_path, first_step=0)
        logger.log(2, {"loss": loss})
        logger.close()
    assert scalars(tmp_path) == {"train/loss": [(2, 2.0)]}


def test_the_means_of_a_part_of_an_epoch_do_not_stay_beside_those_of_the_whole(tmp_path):
    """After max_steps within an epoch, a run that went on had two values of that epoch."""
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    first.log(2, {"loss": 3.0})
    first.epoch(0, 2, {"loss": 3.0, "accuracy": 0.5, "validation_loss": 4.0, "epochs_done": 0.5})
    first.close()
    second = TensorBoard(tmp_path, first_step=2)
    second.epoch(0, 4, {"loss": 2.0, "accuracy": 0.75, "validation_loss": 1.0})
    second.close()
    assert scalars(tmp_path) == {
        "train/loss": [(2, 3.0)],
        "epoch/loss": [(4, 2.0)],
        "epoch/accuracy": [(4, 0.75)],
        "epoch/validation_loss": [(2, 4.0), (4, 1.0)],
        "epoch/epochs_done": [(2, 0.5)],
    }


def test_evaluations_within_an_epoch_and_at_its_end_are_one_curve(tmp_path):
    """Those within an epoch were train/validation_loss, beside the training's own numbers."""
    pytest.importorskip("tensorboard")
    logger = TensorBoard(tmp_path)
    logger.log(2, {"loss": 3.0})
    logger.log(2, {"validation_loss": 5.0})
    logger.epoch(0, 4, {"loss": 2.5, "validation_loss": 4.0})
    logger.close()
    assert scalars(tmp_path) == {
        "train/loss": [(2, 3.0)],
        "epoch/loss": [(4, 2.5)],
        "epoch/validation_loss": [(2, 5.0), (4, 4.0)],
    }


def test_results_can_be_seen_after_each_epoch_while_the_run_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoard(tmp_path)
    logger.epoch(0, 5, {"accuracy": 0.75})
    try:
        assert scalars(tmp_path) == {"epoch/accuracy": [(5, 0.75)]}
    finally:
        logger.close()


def test_a_missing_package_is_said_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    logger = MultiLogger([TensorBoard(tmp_path / "tb")])
    for step in range(3):
        logger.log(step, {"loss": 1.0})
    logger.epoch(0, 3, {"accuracy": 1.0})
    logger.close()
    assert len(caplog.records) == 1
    assert "pip install tensorboard" in caplog.text
    assert not (tmp_path / "tb").exists()


def test_a_folder_that_cannot_be_made_warns_once(caplog):
    pytest.importorskip("tensorboard")
    logger = MultiLogger([TensorBoard("/proc/run/tb")])
    for step in range(3):
        logger.log(step, {"loss": 1.0})
    assert len(caplog.records) == 1
    assert os.strerror(2) in caplog.text
