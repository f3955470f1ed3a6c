"""What a rank of ``lockstep train`` runs: assemble the job, train, say what came of it."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from lockstep.job.assemble import assemble
from lockstep.job.config import JobConfig
from lockstep.job.history import one_recipe, read_starts
from lockstep.job.record import record
from lockstep.job.run_folder import run_folder
from lockstep.levels import Level
from lockstep.run.unused_options import mention_unused_options
from lockstep.timeline.window import Window
from lockstep.trainer import Outcome
from lockstep.world import World

_OF_PLACE = (
    *("--devices", "--resume", "--strategy", "--mesh", "--restarts", "--restart-world"),
    *("--nnodes", "--node-rank", "--master", "--interface", "--token-file", "--start-limit", "--rendezvous"),
    *("--debug-rank", "--debug-port"),
)
"""Options of ``train`` that say where a job runs; they have no part in its result."""


def main(payload: Any) -> None:
    """Trains a job on this rank.

    Args:
        payload: ``{"config": JSON of the job, "command": the words that started it, "profile": FIRST:COUNT or
            nothing}``.
    """
    config = JobConfig.from_json(payload["config"])
    world = World.from_environment()
    logging.basicConfig(
        level=logging.INFO if world.is_main else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    trainer = assemble(config, world, profile=payload.get("profile", ""))
    if world.is_main:
        mention_unused_options(trainer.run.options)
    record(trainer, config, run_folder(config))
    starts = read_starts(run_folder(config)) if world.is_main else []
    outcome = trainer.fit()
    if world.is_main:
        bitwise = (
            outcome.level is Level.BITWISE and config.training.reduce == "ordered" and one_recipe(starts)
        )
        proof = prove(payload["command"], config.training.strategy, world.world_size) if bitwise else ""
        print(report(outcome, proof), flush=True)


def report(outcome: Outcome, proof: str) -> str:
    """The last lines of a run, for people and for scripts.

    Args:
        outcome: what the run came to.
        proof: the command that ends in the same fingerprint on other devices; empty where none is promised to.
    """
    rows = []
    if outcome.metric in outcome.values:
        value = outcome.values[outcome.metric]
        shown = f"{100 * value:.2f} %" if outcome.metric.endswith("accuracy") else f"{value:.6g}"
        best = (
            f"{100 * outcome.best:.2f} %"
            if outcome.metric.endswith("accuracy") and outcome.best
            else outcome.best
        )
        rows.append(
            (
                outcome.metric.removeprefix("validation_"),
                f"{shown} (best {best}, epoch {outcome.best_epoch + 1})",
            )
        )
    if outcome.seconds:
        speed = f"{outcome.samples_per_second:,.0f} samples/s, {outcome.seconds:.1f} s of training"
        rows.append(("speed", speed))
    if outcome.bytes_per_step:
        rows.append(("sent", f"{_size(outcome.bytes_per_step)} per step and rank"))
    rows += outcome.remarks.items()
    if outcome.skipped_steps:
        rows.append(("skipped", f"{outcome.skipped_steps} steps whose scaled gradients overflowed"))
    if outcome.weights is not None:
        rows.append(("weights", str(_shown(outcome.weights))))
    rows.append(("fingerprint", outcome.fingerprint))
    if proof:
        rows.append(("prove it", f"{proof}   (ends in the same fingerprint)"))
    return "\n".join(f"{name:12} {text}" for name, text in rows)


def _size(count: float) -> str:
    """A number of bytes for people: 840 bytes, 12.3 kB, 1.2 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def prove(command: list[str], strategy: str, ranks: int) -> str:
    """The command that gives the same result elsewhere: on one device, or on two where one has done it.

    Args:
        command: the words that started the run.
        strategy: of the run.
        ranks: how many processes it had.
    """
    words, skip = [], False
    for word in _without_profile(command):
        if skip or word.startswith(tuple(f"{option}=" for option in _OF_PLACE)):
            skip = False
        elif word in _OF_PLACE:
            skip = True
        else:
            words.append(word)
    if strategy not in ("single", "ddp"):
        return shlex.join([*words, "--strategy", "single", "--devices", "1"])
    other = [] if strategy == "ddp" else ["--strategy", "ddp"]
    return shlex.join([*words, *other, "--devices", "1" if ranks > 1 else "2"])


def _without_profile(command: list[str]) -> list[str]:
    """The words without ``--profile``, whose value may be left out."""
    return [
        word
        for before, word in zip(["", *command], command)
        if word != "--profile"
        and not word.startswith("--profile=")
        and not (before == "--profile" and Window.matches(word))
    ]


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
