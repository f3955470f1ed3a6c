"""What a rank of ``lockstep verify`` runs: some steps of a job, observed; nothing is written to the user's folders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.job.assemble import assemble
from lockstep.job.config import JobConfig
from lockstep.verify.observer import Observer
from lockstep.verify.trace import Trace
from lockstep.world import World


def main(payload: Any) -> None:
    """Trains some steps of a job on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"config": JSON of the job, "steps": how many, "label": of the layout, "folder": for the trace}``.
    """
    logging.basicConfig(level=logging.ERROR)
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    folder = Path(payload["folder"])
    try:
        trainer = assemble(config, world)
    except ConfigError as error:
        if world.is_main:
            strategy = config.training.strategy
            refused = Trace(payload["label"], strategy, world.world_size, "", refused=str(error))
            refused.write(folder / "trace.json")
        return
    observer = Observer(trainer.run, payload["label"])
    done = 0
    for _ in trainer.run.epochs(config.training.epochs):
        for batch in trainer.batches():
            observer.begin_step()
            observer.end_step(trainer.train_step(batch))
            done += 1
            if done == payload["steps"]:
                break
        if done == payload["steps"]:
            break
    trace = observer.finish(folder / "final.safetensors")
    if world.is_main:
        trace.write(folder / "trace.json")
    trainer.run.close()
