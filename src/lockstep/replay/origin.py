"""Finds the state from which a replay starts: the nearest checkpoint at or before the step, or the start of the run.

starts        0 ................................ 24 (resumed)
checkpoints              12                      24        36
step 30                                          |-> 30               from step-00000024
step 9        |--> 9                                                  from the seed
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from lockstep import checkpoint
from lockstep.checkpoint.folder import step_of
from lockstep.config.job import CheckpointConfig, JobConfig, LogConfig, RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.job.run_folder import Start, read_starts
from lockstep.text import shorten

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The state from which a replay starts."""

    start: Start
    """The start of the run to which the step belongs."""
    step: int
    """The first step that is recomputed."""
    checkpoint: Path | None
    """Holds the state; None where it follows from the seed."""

    @property
    def label(self) -> str:
        """As in ``step-00000012``."""
        return self.checkpoint.name if self.checkpoint is not None else "the beginning of the run"


def find_origin(folder: Path, step: int) -> Origin:
    """The origin for a step of the run in ``folder``; steps are counted from 0 over all epochs.

    Raises:
        ConfigError: the run does not exist, the step is not part of it, or no state is left to start from.
    """
    starts = read_starts(folder)
    if step < 0:
        raise ConfigError(f"Step {step} does not exist; steps are counted from 0.")
    if step < starts[0].step:
        raise ConfigError(
            f"Step {step} is not part of the run in '{folder}', which resumed from step {starts[0].step} of another "
            "run. Replay that run instead."
        )
    start = [each for each in starts if each.step <= step][-1]
    path, first = _newest(folder, step) or _beginning(folder, starts[0], step)
    before = [each for each in starts if each.step <= first][-1]
    for each in (each for each in starts if first < each.step <= start.step):
        same_recipe = single_process_config(each.job) == single_process_config(before.job)
        if not same_recipe or dict(each.context) != dict(before.context):
            raise ConfigError(
                f"Step {step} cannot be recomputed: the run was resumed with other settings at step {each.step}, that "
                f"checkpoint no longer exists, and the nearest one is of step {first}. Keep more checkpoints with "
                "checkpoint.keep."
            )
    return Origin(start=start, step=first, checkpoint=path)


def single_process_config(job: JobConfig, *, resume: str = "", force_context: bool = False) -> JobConfig:
    """The recipe of a job on one device and in one process, which writes nothing and starts from ``resume``."""
    return JobConfig(
        job=job.job,
        code=job.code,
        model=job.model,
        weights=job.weights,
        data=dataclasses.replace(job.data, validation=None, workers=0),
        loss=job.loss,
        optimizer=job.optimizer,
        schedule=job.schedule,
        training=dataclasses.replace(
            job.training,
            strategy="single",
            mesh="",
            fingerprint_every=0,
            gradients_every=0,
            record_micro_batches=False,
        ),
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
            logger.warning("Checkpoint skipped: %s", error)
        else:
            return path, found[0]
    return None


def _beginning(folder: Path, first: Start, step: int) -> tuple[Path | None, int]:
    """The initial state of the run: None for the seed, or a checkpoint of another run."""
    resume = first.job.checkpoint.resume
    if first.step == 0:
        return None, 0
    if resume != "auto" and Path(resume).is_dir():
        return Path(resume), first.step
    steps = shorten(found[0] for path in checkpoint.committed(folder) if (found := step_of(path)))
    raise ConfigError(
        f"'{folder}' has no checkpoint at or before step {step} (its steps: {steps or 'none'}), and the checkpoint "
        f"from which the run started at step {first.step} no longer exists. Choose a later step, and keep more "
        "checkpoints with checkpoint.keep."
    )
