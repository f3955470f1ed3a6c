"""What a rank of ``lockstep scale`` runs: some steps of a job, timed; nothing is written to the user's folders."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.job.assemble import assemble
from lockstep.job.config import JobConfig
from lockstep.scale.observer import StepObserver
from lockstep.trainer import Trainer
from lockstep.world import World


def main(payload: Any) -> None:
    """Trains some steps of a job on this rank and writes ``rank-N.json``; if the job is refused, rank 0 says why.

    Args:
        payload: ``{"config": JSON of the job, "steps": measured ones, "warm_up": steps before them, "folder": path}``.
    """
    logging.basicConfig(level=logging.ERROR)
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    folder = Path(payload["folder"])
    try:
        trainer = assemble(config, world)
    except ConfigError as error:
        if world.is_main:
            (folder / "refused").write_text(str(error))
        return
    found = _train(trainer, config, payload["warm_up"], payload["steps"])
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
    trainer.run.close()


def _train(trainer: Trainer, config: JobConfig, warm_up: int, steps: int) -> dict[str, Any]:
    """Runs the steps; gives what was measured of those after the warm-up."""
    run = trainer.run
    observer = StepObserver(run)
    samples: list[int] = []
    began = ended = time.perf_counter()
    while (
        len(samples) < warm_up + steps
    ):  # outside of run.epochs every pass over the batches is the next epoch
        for batch in trainer.batches():
            trainer.train_step(batch)
            observer.end_step()
            samples.append(batch.plan.samples)
            ended = time.perf_counter()
            if len(samples) == warm_up:
                began = ended
            if len(samples) == warm_up + steps:
                break
    return {
        "seconds": ended - began,
        "samples": sum(samples[warm_up:]),
        "steps": observer.clock.steps[warm_up:],
        "steps_per_epoch": trainer.steps_per_epoch,
        "parameter_bytes": sum(p.nbytes for p in run.strategy.trainable().values()),
        "bytes_sent": run.strategy.bytes_sent / (warm_up + steps),
        "micro_batches": config.training.micro_batches,
        "micro_batch_size": config.training.global_batch // config.training.micro_batches,
    }
