"""Metrics for TensorBoard, where its package is installed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


class TensorBoard:
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

    def begin(self, epoch: int, **_: Any) -> None:
        """Does nothing: TensorBoard's axis is the step."""

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Writes each metric; see ``tags``."""
        self._write(step, tags(values, of_epoch=False))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Writes each result, and makes everything so far visible."""
        self._write(step, tags(without_partial_means(values), of_epoch=True))
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
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
