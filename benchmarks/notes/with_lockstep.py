"""The same job with Lockstep's own trainer; a benchmark's rounds begin and end between its steps."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.gate import Gate
from torch import Tensor

import lockstep.run.session as session
from lockstep.data.batch import Batch
from lockstep.job.assemble import assemble
from lockstep.job.config_file import load_job
from lockstep.job.config_overrides import parse_set
from lockstep.trainer import Trainer
from lockstep.world import World

HERE = Path(__file__).resolve().parent


class Over(Exception):
    """The benchmark has asked the rank to stop."""


class Rounds:
    """Stands between the trainer and its gradients: the first thing of a step that it can see."""

    def __init__(self, trainer: Trainer, gate: Gate, read_loss: bool) -> None:
        self._run, self._gate, self._read_loss = trainer.run, gate, read_loss
        self._begun = False

    def backward(self, batch: Batch, loss: Callable[..., Any], *, follows_save: bool) -> Tensor:
        """Ends the step before, waits for a round if none is open, and computes the gradients."""
        if self._begun and not self._gate.step_done():
            raise Over
        self._begun = True
        value = self._run.backward(batch, loss)
        if self._read_loss:
            value.item()
        return value


def train(given: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.ERROR)
    if given.give_back:
        session.keep_freed_memory = lambda: False
    world = World.from_environment()
    config = load_job(str(HERE / "notes.toml"), [parse_set(text) for text in given.set], imports=False)
    trainer = assemble(config, world)
    trainer.watcher = Rounds(trainer, Gate(given.control, world.rank), given.read_loss)
    try:
        trainer.fit()
    except Over:
        trainer.run.close()


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as for lockstep train"
    )
    parser.add_argument("--read-loss", action="store_true", help="read the loss in every step")
    parser.add_argument("--give-back", action="store_true", help="let freed memory go back to the system")
    parser.add_argument("--control", type=Path, required=True, help="the harness' socket")
    return parser.parse_args()


if __name__ == "__main__":
    train(read_command_line())
