"""Writes down the digests of some steps' gradients while a job trains; ``lockstep replay`` compares with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.trainer.gradients.digests import digest_gradients
from lockstep.trainer.gradients.micro_batches import MicroBatchWatch
from lockstep.trainer.gradients.record import GradientDigest, GradientLog, GradientRecord

_IN_REPLICAS = ("dp", "tensor")
"""Strategies that compute a micro-batch with other parameters than those of the prepared model."""


class GradientRecorder:
    """Stands between the trainer and its handle. Every rank must make one, and the same calls.

    Args:
        run: prepared.
        folder: of the run; written by the main process only.
        every: steps between two records; the step after each checkpoint has one too.
        micro_batches: also record each micro-batch's own gradient.
    """

    def __init__(self, run: Run, folder: Path, every: int, *, micro_batches: bool = False) -> None:
        self._run, self._every = run, every
        if micro_batches:
            require_separate_micro_batches(run)
        self._watch = MicroBatchWatch(run) if micro_batches else None
        self._log = GradientLog(folder, run.position.step) if run.is_main else None

    def backward(self, batch: Batch, loss: Callable[..., Any], *, follows_save: bool) -> Tensor:
        """As ``Run.backward``, and writes a record where one is due. Collective.

        Args:
            batch: of the step.
            loss: function of (output, target).
            follows_save: whether a checkpoint holds the state that the step begins with.
        """
        step = batch.plan.step
        if step % self._every and not follows_save:
            return self._run.backward(batch, loss)
        with self._watch.watching() if self._watch is not None else nullcontext():
            value = self._run.backward(batch, loss)
        with self._run.span("record"):
            self._record(step, value)
        return value

    def _record(self, step: int, loss: Tensor) -> None:
        digests, norm = digest_gradients(self._run)
        parts = self._watch.take() if self._watch is not None else {}
        if self._log is not None:
            self._log.append(
                GradientRecord(
                    step=step,
                    loss=float(loss).hex(),
                    norm=norm,
                    gradient=GradientDigest.of(digests),
                    micro_batches={k: GradientDigest.of(part) for k, part in parts.items()},
                )
            )


def require_separate_micro_batches(run: Run) -> None:
    """Raises ``ConfigError`` where no single micro-batch's gradient is to be had from a run."""
    if run.options.sync_batch_norm:
        raise ConfigError(
            "With training.sync_batch_norm a process computes its micro-batches in one pass, so none has a gradient of "
            "its own. Leave training.record_micro_batches and --micro-batch out."
        )
    if run.strategy.name in _IN_REPLICAS:
        raise ConfigError(
            f"Strategy {run.strategy.name!r} computes micro-batches with parts or copies of the model, whose gradients "
            "training.record_micro_batches cannot tell apart. Leave it out, or use strategy 'ddp'."
        )
