"""Runs of Weights & Biases and MLflow, written to this host by their own packages; a resumed run goes on in its own."""

import sys
from unittest import mock

import pytest

from lockstep.loggers.trackers import MLflow, WeightsAndBiases


def written(tracker, directory, step):
    logger = tracker("project", directory, {"training": {"epochs": 3}})
    logger.begin(0, epochs=1, start=0, steps=4)
    logger.log(step, {"loss": 0.5 * step})
    logger.epoch(0, step, {"accuracy": 0.75})
    logger.close()
    logger.close()


def test_mlflow_has_one_run_with_the_metrics_of_both_parts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracked").as_uri())
    for step in (2, 4):
        written(MLflow, tmp_path, step)
    number = (tmp_path / "mlflow.txt").read_text().strip()
    client = mlflow.MlflowClient()
    history = client.get_metric_history(number, "train/loss")
    assert [(each.step, each.value) for each in history] == [(2, 1.0), (4, 2.0)]
    run = client.get_run(number)
    assert run.data.params["training.epochs"] == "3"
    assert (run.data.metrics["epoch/accuracy"], run.info.status) == (0.75, "FINISHED")


def test_charts_of_wandb_are_drawn_over_optimizer_steps(tmp_path, monkeypatch):
    """They were drawn over the number of records."""
    calls = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    written(WeightsAndBiases, tmp_path, 30)
    run = calls.init.return_value
    assert run.define_metric.call_args == mock.call("*", step_metric="step")
    assert run.log.call_args_list[0] == mock.call({"train/loss": 15.0, "step": 30})


def test_a_tracker_has_all_evaluations_in_one_curve(tmp_path, monkeypatch):
    calls = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    logger = WeightsAndBiases("project", tmp_path, {})
    logger.log(2, {"validation_loss": 5.0})
    logger.epoch(0, 4, {"validation_loss": 4.0})
    sent = [call.args[0] for call in calls.init.return_value.log.call_args_list]
    assert sent == [{"epoch/validation_loss": 5.0, "step": 2}, {"epoch/validation_loss": 4.0, "step": 4}]


def test_wandb_is_sent_each_number_once_and_the_run_goes_on(tmp_path, monkeypatch):
    calls = mock.Mock()
    calls.init.return_value.id = "abc"
    monkeypatch.setitem(sys.modules, "wandb", calls)
    for step in (2, 4):
        written(WeightsAndBiases, tmp_path, step)
    first, again = calls.init.call_args_list
    shown = {
        "project": "project",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": {"training": {"epochs": 3}},
    }
    assert first == mock.call(**shown, id=None, resume=None)
    assert again == mock.call(**shown, id="abc", resume="allow")
    run = calls.init.return_value
    assert run.define_metric.call_args_list[0] == mock.call("step")
    assert run.log.call_args_list == [
        mock.call({"train/loss": 1.0, "step": 2}),
        mock.call({"epoch/accuracy": 0.75, "step": 2}),
        mock.call({"train/loss": 2.0, "step": 4}),
        mock.call({"epoch/accuracy": 0.75, "step": 4}),
    ]
    assert run.finish.call_count == 2


def test_mlflow_is_sent_each_number_once_and_the_run_goes_on(tmp_path, monkeypatch):
    calls = mock.Mock()
    client = calls.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "abc"
    monkeypatch.setitem(sys.modules, "mlflow", calls)
    for step in (2, 4):
        written(MLflow, tmp_path, step)
    experiment = calls.set_experiment.return_value.experiment_id
    assert calls.set_experiment.call_args_list == [mock.call("project")]
    assert client.create_run.call_args_list == [mock.call(experiment, run_name=tmp_path.name)]
    assert client.log_param.call_args_list == [mock.call("abc", "training.epochs", 3)]
    assert client.log_metric.call_args_list == [
        mock.call("abc", "train/loss", 1.0, step=2),
        mock.call("abc", "epoch/accuracy", 0.75, step=2),
        mock.call("abc", "train/loss", 2.0, step=4),
        mock.call("abc", "epoch/accuracy", 0.75, step=4),
    ]
    assert client.set_terminated.call_args_list == [mock.call("abc"), mock.call("abc")]


def test_wandb_has_a_run_of_the_folder_s_name_that_goes_on(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (2, 4):
        written(WeightsAndBiases, tmp_path, step)
    wandb.teardown()
    number = (tmp_path / "wandb.txt").read_text().strip()
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert runs and all(number in name for name in runs)  # two of one second end in -1
