"""Lets a job that is trained leave behind what ``lockstep replay`` needs: its settings, and digests of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.checkpoint.temporary import write_whole
from lockstep.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.job.history import FILE, Start, read_starts, with_start
from lockstep.levels import Level
from lockstep.plan import Share
from lockstep.run import Run
from lockstep.trainer import Trainer
from lockstep.trainer.gradients import GradientRecorder


def record(trainer: Trainer, config: JobConfig, folder: Path) -> None:
    """Writes the job into the run folder, and has digests of gradients written there. Collective.

    Gradients are recorded where their bits depend on the recipe alone, which level A promises.

    Args:
        trainer: ready to run.
        config: what it was made from.
        folder: of the run.

    Raises:
        ConfigError: gradients of micro-batches are asked for where there are none, or the folder cannot be written.
    """
    run, training = trainer.run, config.training
    every = training.gradients_every
    every = training.fingerprint_every if every is None else every
    if every and run.strategy.level is Level.BITWISE:
        trainer.watcher = GradientRecorder(run, folder, every, micro_batches=training.record_micro_batches)
    elif training.record_micro_batches:
        raise ConfigError(
            "training.record_micro_batches is true, but gradients are recorded at level A only, and strategy "
            f"{run.strategy.name!r} promises level {run.strategy.level.value} here. Leave it out."
        )
    shares = _shares(run)
    if run.is_main:
        _note_start(run, config, folder, shares)


def _shares(run: Run) -> list[Share]:
    """Which micro-batches each rank computes, by rank. Collective."""
    group, mine = run.require_prepared().group, asdict(run.strategy.share)
    everyone = gather_json(mine, group, run.device) if group is not None else [mine]
    return [Share(**each) for each in everyone]


def _note_start(run: Run, config: JobConfig, folder: Path, shares: Sequence[Share]) -> None:
    start = Start(
        step=run.position.step,
        strategy=" ".join(part for part in (run.options.strategy, run.options.mesh) if part),
        shares=shares,
        level=run.strategy.level.value,
        device=run.device.type,
        context=run.require_prepared().context.as_dict(),
        job=config,
    )
    earlier: list[Start] = []
    with contextlib.suppress(ConfigError):  # the first start, or a file that nobody can use
        earlier = read_starts(folder)
    try:
        write_whole(folder / FILE, with_start(earlier, start).encode())
    except OSError as error:
        raise ConfigError(f"The run folder '{folder}' cannot be written: {error.strerror}.") from error
