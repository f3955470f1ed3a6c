"""Has a run's timeline written: says where to look at what a rank does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.run.options import RunOptions
from lockstep.timeline import file
from lockstep.timeline.device import DeviceTrace
from lockstep.timeline.timeline import Timeline
from lockstep.timeline.window import Window
from lockstep.world import World


def as_launched(options: RunOptions, world: World) -> RunOptions:
    """The options with the timeline that ``lockstep run --profile`` asked for, which comes before the script's own.

    Raises:
        ConfigError: the script names no run folder.
    """
    if not world.profile:
        return options
    if options.directory is None:
        raise ConfigError(
            f"--profile {world.profile} was asked for, and the script's lockstep.init names no folder for "
            f"{file.FILE}. Give it directory=...."
        )
    return dataclasses.replace(options, profile=world.profile)


def make_file(run: Any) -> None:
    """Makes the file of the timeline, if one is asked for; ``ConfigError`` where it cannot be. On the main process."""
    if run.options.profile:
        file.begin(Path(run.options.directory))


def watch(run: Any) -> Timeline:
    """The timeline of a prepared run, which begins to look.

    Args:
        run: a ``Run``, whose options have a ``profile``.
    """
    on_gpu = run.device.type == "cuda"
    timeline = Timeline(
        Window.parse(run.options.profile),
        Path(run.options.directory),
        rank=run.world.rank,
        title=f"rank {run.world.rank} ({run.options.strategy}, {run.device.type})",
        device=DeviceTrace() if on_gpu else None,
    )
    run._feeder.clocks = timeline.clocks
    timeline.listen(run._session.heartbeat)
    timeline.watch_backward(run.strategy)
    for name, phase in (("evaluate", "evaluate"), ("save", "save"), ("fingerprint", "fingerprint")):
        timeline.watch_call(run, name, phase)
    if on_gpu:
        timeline.watch_inside(run._compute, "_to_device", "copy")
    return timeline
