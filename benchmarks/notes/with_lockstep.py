"""The same job with Lockstep's own trainer; a benchmark's rounds begin and end between its steps."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from harness.gate import Gate
from torch import Tensor

import lockstep.run.session as session
from lockstep.config.job_file import load_job, parse_set
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.job.assemble import assemble
from lockstep.runtime import Callback

HERE = Path(__file__).resolve().parent


class Over(Exception):
    """The benchmark has asked the rank to stop."""


class Rounds(Callback):
    """Begins and ends rounds where a step begins to compute."""

    def __init__(self, gate: Gate, read_loss: bool) -> None:
        self._gate, self._read_loss = gate, read_loss
        self._begun = False

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Ends the step before, and waits for a round if none is open."""
        if self._begun and not self._gate.step_done():
            raise Over
        self._begun = True

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Reads the loss, if asked to."""
        if self._read_loss:
            loss.item()


def train(given: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.ERROR)
    if given.give_back:
        session.keep_freed_memory = lambda: False
    world = World.from_environment()
    config = load_job(str(HERE / "notes.toml"), [parse_set(text) for text in given.set], imports=False)
    trainer = assemble(config, world)
    trainer.run.add_callback(Rounds(Gate(given.control, world.rank), given.read_loss))
    try:
        trainer.fit()
    except Over:
        trainer.run.close()


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for lockstep train")
    parser.add_argument("--read-loss", action="store_true", help="read the loss in every step")
    parser.add_argument("--give-back", action="store_true", help="let freed memory go back to the system")
    parser.add_argument("--control", type=Path, required=True, help="the harness' socket")
    return parser.parse_args()


if __name__ == "__main__":
    train(read_command_line())
