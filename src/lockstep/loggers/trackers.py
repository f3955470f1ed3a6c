"""Metrics for TensorBoard, Weights & Biases and MLflow, through their own packages, which the user installs.

Each is opened with the first metrics. The number that a tracker gives a run is kept in the run folder, so that a
resumed run continues it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.reader import flat
from lockstep.loggers.console import import_installed

_messages = logging.getLogger(__name__)
_MEANS = ("loss", "accuracy", "samples_per_second")


def without_partial_means(values: Mapping[str, float]) -> dict[str, float]:
    """The results of an epoch, without its means where a run ended within it: what was written cannot be taken back.

    A run that resumes there writes the means of the whole epoch.
    """
    return {name: each for name, each in values.items() if "epochs_done" not in values or name not in _MEANS}


def tags(values: Mapping[str, float], *, of_epoch: bool) -> dict[str, float]:
    """Values under ``train/``; under ``epoch/`` those of an epoch, and of every evaluation, so that it is one curve."""
    return {
        f"{'epoch' if of_epoch or name.startswith('validation_') else 'train'}/{name}": value
        for name, value in values.items()
    }


class _Curves(ABC):
    """A curve for each metric over the steps, by the names that ``tags`` gives them."""

    def begin(self, epoch: int, **_: Any) -> None:  # noqa: B027  none of them needs it
        """Does nothing: the axis is the step."""

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Writes each metric."""
        self._write(step, tags(values, of_epoch=False))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Writes each result."""
        self._write(step, tags(without_partial_means(values), of_epoch=True))

    @abstractmethod
    def _write(self, step: int, values: dict[str, float]) -> None:
        """Writes values by their names, and opens what they go to with the first."""


class TensorBoard(_Curves):
    """Writes scalars as TensorBoard's event files; without the package it warns once and does nothing.

    Args:
        directory: folder of the event files.
        first_step: steps done before this run resumes; what an earlier run wrote about later steps is hidden.
    """

    def __init__(self, directory: Path | str, *, first_step: int = 0) -> None:
        self._directory = Path(directory)
        self._first_step = first_step
        self._writer: Any = None
        self._missing = False

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Writes each result, and makes everything so far visible."""
        super().epoch(epoch, step, values)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None and not self._missing:
            self._open()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def _open(self) -> None:
        try:
            SummaryWriter = import_installed("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            self._missing = True
            _messages.warning(
                "The package tensorboard is not installed; training continues without TensorBoard logs. "
                "Install it with: pip install tensorboard"
            )
            return
        self._writer = SummaryWriter(str(self._directory), purge_step=self._first_step + 1)


class _Tracker(_Curves):
    """A run of a tracker.

    Args:
        project: that the run belongs to.
        directory: the run folder, whose name is that of the run.
        settings: shown with the run.
    """

    package = ""

    def __init__(self, project: str, directory: Path, settings: Mapping[str, Any]) -> None:
        self._project, self._directory, self._settings = project, directory, settings
        self._is_open = False

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
