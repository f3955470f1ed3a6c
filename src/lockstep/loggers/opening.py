"""Opens the loggers that a run asks for, on the process that has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError, nearest
from lockstep.loggers.console import Console
from lockstep.loggers.json_lines import JsonLines
from lockstep.loggers.multi import MultiLogger
from lockstep.loggers.protocol import Logger, NullLogger
from lockstep.loggers.tensorboard import TensorBoard
from lockstep.world import World

KNOWN = ("console", "jsonl", "tensorboard")


def open_loggers(
    world: World,
    directory: Path | None,
    names: Sequence[str] = ("console", "jsonl"),
    *,
    first_step: int = 0,
    open_epoch: int | None = None,
) -> Logger:
    """The loggers of ``names`` as one, on the main process; a ``NullLogger`` on every other.

    Args:
        world: who this process is.
        directory: the run folder, for ``log.jsonl`` and ``tensorboard/``; None leaves those two out.
        names: of ``console``, ``jsonl`` and ``tensorboard``.
        first_step: steps done before this run goes on; 0 for a new one.
        open_epoch: the epoch within which it goes on, if there is one.
    """
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"loggers: {name!r} is not known.{nearest(name, KNOWN)}")
    if not world.is_main:
        return NullLogger()
    loggers: list[Logger] = []
    for name in dict.fromkeys(names):
        if name == "console":
            loggers.append(Console())
        elif directory is not None and name == "jsonl":
            loggers.append(JsonLines(directory / "log.jsonl", first_step=first_step, open_epoch=open_epoch))
        elif directory is not None:
            loggers.append(TensorBoard(directory / "tensorboard", first_step=first_step))
    return MultiLogger(loggers)
