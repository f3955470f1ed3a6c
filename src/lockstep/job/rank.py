"""Runs ``lockstep train`` in a rank: assembles the job, trains, records it for ``lockstep replay``, and reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config.job import JobConfig, ScheduleConfig
from lockstep.config.options import mention_unused_options
from lockstep.config.strategy_options import Level
from lockstep.core.atomic import NOT_WRITABLE, write_whole
from lockstep.core.plan import Share
from lockstep.core.world import World
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError, DataError
from lockstep.job.assemble import assemble
from lockstep.job.run_folder import FILE, OUTCOME, Start, one_recipe, read_starts, recipe_digest, run_folder, with_start
from lockstep.job.summary import describe_outcome
from lockstep.run import Run
from lockstep.runtime.error_record import users_lines
from lockstep.runtime.output import log_to_terminal, print_result
from lockstep.trainer import Trainer
from lockstep.trainer.audit_record import AuditRecorder
from lockstep.trainer.gradient_record import GradientLog, GradientRecorder

logger = logging.getLogger(__name__)


def record(trainer: Trainer, config: JobConfig, folder: Path) -> AuditRecorder | None:
    """Writes the job into the run folder, and has digests of gradients and the audit chain written there. Collective.

    Gradients are recorded where their bits depend only on the recipe, which level A promises. Returns what records
    the audit chain, where the job asks for one.

    Args:
        trainer: ready to run.
        config: what it was made from.
        folder: of the run.

    Raises:
        ConfigError: gradients of micro-batches or an audit chain are asked for where there are none, or the folder
            cannot be written.
    """
    run, training = trainer.run, config.training
    every = training.record_every
    if every and run.strategy.level is Level.BITWISE:
        run.add_callback(GradientRecorder(run, folder, every, micro_batches=training.record_micro_batches))
    elif training.record_micro_batches:
        raise ConfigError(
            "training.record_micro_batches is true, but gradients are recorded at level A only, and strategy "
            f"{run.strategy.name!r} promises level {run.strategy.level.value} here. Leave it out."
        )
    elif run.is_main:
        GradientLog(folder, run.position.step)  # of steps that are done again, and not recorded
    if training.audit and run.strategy.level is not Level.BITWISE:
        raise ConfigError(
            f"training.audit is true, but only runs of level A can be audited, and strategy {run.strategy.name!r} "
            f"promises level {run.strategy.level.value} here. Leave it out."
        )
    everyone = gather_json(asdict(run.strategy.share), run.strategy.all_ranks, run.device)
    if run.is_main:
        _note_start(run, config, folder, [Share(**each) for each in everyone])
    if not training.audit:
        return None
    recorder = AuditRecorder(run, folder, recipe_digest(config))
    run.add_callback(recorder)
    return recorder


def _note_start(run: Run, config: JobConfig, folder: Path, shares: Sequence[Share]) -> None:
    start = Start(
        step=run.position.step,
        strategy=" ".join(part for part in (run.options.strategy, run.options.mesh) if part),
        shares=shares,
        level=run.strategy.level.value,
        device=run.device.type,
        context=run.require_prepared().state.context.as_dict(),
        job=config,
    )
    earlier: list[Start] = []
    with contextlib.suppress(ConfigError):  # the first start, or a file that nobody can use
        earlier = read_starts(folder)
    try:
        write_whole(folder / FILE, with_start(earlier, start).encode())
    except OSError as error:
        raise ConfigError(f"The run folder '{folder}' cannot be written: {error.strerror}.") from error


def main(payload: Any) -> None:
    """Trains a job on this rank, and prints the report on the main process.

    Args:
        payload: ``{"config": JSON of the job, "proof": a command with the same result, "profile": FIRST:COUNT}``.
    """
    world = World.from_environment()
    log_to_terminal(logging.INFO if world.is_main else logging.WARNING)
    config = JobConfig.from_json(payload["config"])
    lines = train(config, world, proof=payload["proof"], profile=payload["profile"])
    if world.is_main:
        print_result(lines, f"The run in '{run_folder(config)}'")


def train(config: JobConfig, world: World, *, proof: str = "", profile: str = "") -> str:
    """Trains a job on this rank; returns the report on the main process, else an empty text. Collective.

    Args:
        config: the job, whose run folder exists.
        world: this rank.
        proof: a command with the same result; empty where there is none.
        profile: the steps of the timeline, as FIRST:COUNT; empty without one.
    """
    trainer = assemble(config, world, profile=profile)
    if world.is_main:
        mention_unused_options(trainer.run.options)
        if isinstance(config.schedule, ScheduleConfig) and config.schedule.unused:
            unused = ", ".join(f"schedule.{name}" for name in config.schedule.unused)
            logger.warning("A schedule of kind %r does not use %s.", config.schedule.kind, unused)
    with _written(run_folder(config)):
        recorder = record(trainer, config, run_folder(config))
        starts = read_starts(run_folder(config)) if world.is_main else []
        outcome = trainer.fit()
        if recorder is not None:
            recorder.end(trainer.run.position.step, outcome.fingerprint, outcome.weights)
        if not world.is_main:
            return ""
        bitwise = outcome.level is Level.BITWISE and config.training.reduce == "ordered"
        proof = proof if bitwise and one_recipe(starts) and not outcome.has_other_data else ""
        ended = {"fingerprint": outcome.fingerprint, "portable": outcome.is_portable, "proof": proof}
        if not (run_folder(config) / FILE).exists():  # the folder was removed or moved away meanwhile
            write_whole(run_folder(config) / FILE, with_start(starts[:-1], starts[-1]).encode())
        write_whole(run_folder(config) / OUTCOME, (json.dumps(ended, indent=1) + "\n").encode())
    return describe_outcome(outcome, proof)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Turns what the system says of a run folder in which no file can be written into one ``DataError``."""
    try:
        yield
    except OSError as error:
        name, is_ours = error.filename, error.errno in NOT_WRITABLE
        place = Path(os.fsdecode(name)).absolute() if isinstance(name, str | bytes) else None
        # A plain OSError of another kind, as of a network's disk, may pass: a restart helps
        if place is not None:
            is_ours = place.is_relative_to(folder.absolute()) and (is_ours or type(error) is not OSError)
        if not is_ours or users_lines(error):
            raise
        raise DataError(
            f"{place or f'A file in {folder}'} could not be written: {error.strerror}. Make room, or make the folder "
            "writable, and go on with --resume auto."
        ) from error
