"""The logger interface, several loggers as one, and the function that opens those that a run asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lockstep.core.world import World
from lockstep.errors import ConfigError, nearest
from lockstep.loggers.console import Console
from lockstep.loggers.metrics_files import CsvTable, JsonLines
from lockstep.loggers.trackers import MLflow, TensorBoard, WeightsAndBiases


class Logger(Protocol):
    """Receives the metrics of a run. ``step`` is the number of optimizer steps done so far, counted over epochs.

    Values are plain floats: the caller of ``log`` decides how often one is copied from the device.
    """

    def begin(
        self, epoch: int, *, epochs: int, start: int, steps: int, done: int = 0, total: int | None = None
    ) -> None:
        """An epoch begins or is resumed.

        Args:
            epoch: counted from 0.
            epochs: of the whole run.
            start: steps done before this epoch.
            steps: steps of this epoch.
            done: those of them that are done, where the run resumes within the epoch.
            total: steps of the whole run; None: as many as its epochs have.
        """

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Metrics of the steps since the last call, such as ``loss``; ``so_far``, where known, those of the epoch."""

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """The results of a finished epoch; ``is_last`` where the run ends with it."""

    def close(self) -> None:
        """Ends the log; calling it twice is allowed."""


_messages = logging.getLogger(__name__)


class MultiLogger:
    """Forwards all metrics to each of its loggers; without any it is the logger of every process but the main one.

    A logger that raises is removed with a warning: a full disk or a closed terminal must not end a run.
    """

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self._loggers = list(loggers)

    def begin(
        self, epoch: int, *, epochs: int, start: int, steps: int, done: int = 0, total: int | None = None
    ) -> None:
        """Tells every logger that an epoch begins or is resumed."""
        where = {"epochs": epochs, "start": start, "steps": steps, "done": done}
        self._each(lambda logger: logger.begin(epoch, **where, total=total))

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Forwards metrics to every logger."""
        self._each(lambda logger: logger.log(step, values, so_far))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Forwards the results of an epoch to every logger."""
        self._each(lambda logger: logger.epoch(epoch, step, values, is_last=is_last))

    def close(self) -> None:
        """Closes every logger that still works."""
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                call(logger)
            # Trackers raise whatever they like, and none of it is worth a run.
            except Exception as error:
                self._loggers.remove(logger)
                with suppress(Exception):
                    logger.close()
                _messages.warning(
                    "Logger %s failed and is disabled; training continues. (%s: %s)",
                    type(logger).__name__,
                    type(error).__name__,
                    error,
                )


KNOWN = ("console", "jsonl", "csv", "tensorboard")


def open_loggers(
    world: World,
    directory: Path | None,
    names: Sequence[str] = ("console", "jsonl"),
    *,
    first_step: int = 0,
    open_epoch: int | None = None,
    trackers: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Logger:
    """The loggers of ``names`` as one, on the main process; one without loggers on every other.

    Args:
        world: who this process is.
        directory: the run folder, for ``log.jsonl``, ``log.csv`` and ``tensorboard/``; None leaves those out.
        names: of ``console``, ``jsonl``, ``csv`` and ``tensorboard``.
        first_step: steps done before this run resumes; 0 for a new one.
        open_epoch: the epoch within which it resumes, if there is one.
        trackers: projects or experiments, by ``wandb`` and ``mlflow``.
        settings: of the run, which trackers show.
    """
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"loggers: {name!r} is not known.{nearest(name, KNOWN)}")
    if not world.is_main:
        return MultiLogger()
    loggers: list[Logger] = []
    for name in dict.fromkeys(names):
        if name == "console":
            loggers.append(Console())
        elif directory is not None and name == "tensorboard":
            loggers.append(TensorBoard(directory / "tensorboard", first_step=first_step))
        elif directory is not None:
            kind = JsonLines if name == "jsonl" else CsvTable
            loggers.append(kind(directory / f"log.{name}", first_step=first_step, open_epoch=open_epoch))
    if directory is not None:
        kinds: dict[str, Callable[..., Logger]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}
        loggers += [kinds[name](given, directory, settings or {}) for name, given in (trackers or {}).items()]
    return MultiLogger(loggers)
