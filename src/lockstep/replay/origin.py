"""Where a replay sets out from: the nearest checkpoint at or before the step, or the beginning of the run.

starts        0 ................................ 24 (resumed)
checkpoints              12                      24        36
step 30                                          |-> 30               from step-00000024
step 9        |--> 9                                                  from the seed
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import checkpoint
from lockstep.checkpoint.folder import step_of
from lockstep.errors import CheckpointError, ConfigError
from lockstep.job.config import CheckpointConfig, JobConfig, LogConfig, RunConfig
from lockstep.job.history import Start, read_starts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The state that a replay begins with."""

    start: Start
    """The start of the run to which the step belongs."""
    step: int
    """The first step that is recomputed."""
    checkpoint: Path | None
    """What holds the state; None where the seed gives it."""

    @property
    def label(self) -> str:
        """For people."""
        return self.checkpoint.name if self.checkpoint is not None else "the beginning of the run"


def find_origin(folder: Path, step: int) -> Origin:
    """The origin for a step of a run.

    Args:
        folder: of the run.
        step: counted from 0 over all epochs.

    Raises:
        ConfigError: there is no such run, the step came before it, or nothing is left to set out from.
    """
    starts = read_starts(folder)
    if step < 0:
        raise ConfigError(f"Step {step} does not exist; steps are counted from 0.")
    if step < starts[0].step:
        raise ConfigError(
            f"Step {step} is not one of the run in '{folder}', which went on from step {starts[0].step} of another "
            "run. Replay that one."
        )
    start = [each for each in starts if each.step <= step][-1]
    path, first = _newest(folder, step) or _beginning(folder, starts[0], step)
    crossed = [each for each in starts if first < each.step <= start.step]
    before = [each for each in starts if each.step <= first][-1]
    for each in crossed:
        if alone(each.job) != alone(before.job) or dict(each.context) != dict(before.context):
            raise ConfigError(
                f"Step {step} cannot be reached: the run was resumed with other settings at step {each.step}, whose "
                f"checkpoint is gone, and the nearest is of step {first}. Keep more with checkpoint.keep."
            )
    return Origin(start=start, step=first, checkpoint=path)


def alone(job: JobConfig, *, resume: str = "", force_context: bool = False) -> JobConfig:
    """The recipe of a job on one device and in one process, which writes nothing.

    Args:
        job: as it was run.
        resume: path of a checkpoint; empty for the seed.
        force_context: go on although other software or another device gives other bits.
    """
    training = dataclasses.replace(
        job.training,
        strategy="single",
        mesh="",
        fingerprint_every=0,
        gradients_every=0,
        record_micro_batches=False,
    )
    return JobConfig(
        job=job.job,
        code=job.code,
        model=job.model,
        weights=job.weights,
        data=dataclasses.replace(job.data, validation=None, workers=0),
        loss=job.loss,
        optimizer=job.optimizer,
        schedule=job.schedule,
        training=training,
        run=RunConfig(threads=job.run.threads),
        checkpoint=CheckpointConfig(resume=resume, force_context=force_context),
        log=LogConfig(tensorboard=False, json=False, progress=False),
    )


def _newest(folder: Path, step: int) -> tuple[Path, int] | None:
    """The newest sound checkpoint at or before a step, and its step."""
    for path in reversed(checkpoint.committed(folder)):
        found = step_of(path)
        if found is None or found[0] > step:
            continue
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            logger.warning("Checkpoint passed over: %s", error)
        else:
            return path, found[0]
    return None


def _beginning(folder: Path, first: Start, step: int) -> tuple[Path | None, int]:
    """What the run began with: the seed, or a checkpoint of another run."""
    resume = first.job.checkpoint.resume
    if first.step == 0:
        return None, 0
    if resume != "auto" and Path(resume).is_dir():
        return Path(resume), first.step
    raise ConfigError(
        f"No checkpoint at or before step {step} is left in '{folder}' (there are {_steps(folder)}), and what the run "
        f"began with at step {first.step} is gone. Choose a later step; keep more with checkpoint.keep."
    )


def _steps(folder: Path) -> str:
    numbers: Sequence[int] = [found[0] for path in checkpoint.committed(folder) if (found := step_of(path))]
    return ", ".join(map(str, numbers)) or "none"
