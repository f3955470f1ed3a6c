"""Metrics for Weights & Biases and for MLflow, through their own packages, which the user installs and logs in to.

The number that a tracker gives a run is kept in the run folder, so that a resumed run continues it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.reader import flat
from lockstep.loggers.console import import_installed
from lockstep.loggers.tensorboard import tags, without_partial_means


class _Tracker(ABC):
    """Opens the run of a tracker with the first metrics, and names them as TensorBoard does.

    Args:
        project: that the run belongs to.
        directory: the run folder, whose name is that of the run.
        settings: shown with the run.
    """

    package = ""

    def __init__(self, project: str, directory: Path, settings: Mapping[str, Any]) -> None:
        self._project, self._directory, self._settings = project, directory, settings
        self._is_open = False

    def begin(self, epoch: int, **_: Any) -> None:  # noqa: B027  no tracker needs it
        """Does nothing: the axis is the step."""

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Sends each metric; see ``tags``."""
        self._write(step, tags(values, of_epoch=False))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Sends each result."""
        self._write(step, tags(without_partial_means(values), of_epoch=True))

    def close(self) -> None:
        """Ends the run at the tracker."""
        if self._is_open:
            self._is_open = False
            self._end()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if not self._is_open:
            file = self._directory / f"{self.package}.txt"
            number = self._open(file.read_text().strip() if file.is_file() else None)
            file.write_text(f"{number}\n")
            self._is_open = True
        self._send(values, step)

    @abstractmethod
    def _open(self, number: str | None) -> str:
        """Opens the run of this number, or a new one, and returns its number."""

    @abstractmethod
    def _send(self, values: dict[str, float], step: int) -> None:
        """Sends values by their names."""

    @abstractmethod
    def _end(self) -> None:
        """Ends the run."""


class WeightsAndBiases(_Tracker):
    """A run of a project of Weights & Biases; see ``_Tracker``."""

    package = "wandb"

    def _open(self, number: str | None) -> str:
        self._run = import_installed("wandb").init(
            project=self._project,
            name=self._directory.name,
            dir=str(self._directory),
            config=dict(self._settings),
            id=number,
            resume=None if number is None else "allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own axis, Step, counts the calls of log
        return str(self._run.id)

    def _send(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def _end(self) -> None:
        self._run.finish()


class MLflow(_Tracker):
    """A run of an experiment of MLflow; see ``_Tracker``."""

    package = "mlflow"

    def _open(self, number: str | None) -> str:
        mlflow = import_installed("mlflow")
        self._client = mlflow.MlflowClient()
        if number is None:
            experiment = mlflow.set_experiment(self._project)
            run = self._client.create_run(experiment.experiment_id, run_name=self._directory.name)
            number = str(run.info.run_id)
            for name, value in flat(self._settings).items():
                self._client.log_param(number, name, value)
        self._number = number
        return number

    def _send(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._number, name, value, step=step)

    def _end(self) -> None:
        self._client.set_terminated(self._number)
