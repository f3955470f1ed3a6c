"""Lets the photos of a job be decoded once, where its setting ``data.cache`` says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lockstep.data import ImageFolder
from lockstep.data.encoded import EncodedPairs
from lockstep.data.naming import look_through
from lockstep.data.wrapping import Wrapping
from lockstep.errors import ConfigError
from lockstep.job.config import DataConfig
from lockstep.launch.control import Stopped, StopReason
from lockstep.run import Run

logger = logging.getLogger(__name__)


def keep_photos(data_set: Any, name: str, config: DataConfig, run: Run) -> None:
    """Opens the cache of a data set's photos, and makes it where there is none. Every rank must call this.

    One rank of each host, or of all that share the folder, decodes; the others wait for it. All show that they are
    alive, and stop when the run is asked to.

    Args:
        data_set: an ``ImageFolder``, ``ArrowFiles``, ``HuggingFace`` or ``TarShards``, also within ``Subset`` and our
            data sets around data sets.
        name: its place in the job, for the error.
        config: the job's settings.
        run: the handle.

    Raises:
        ConfigError: the set is none of photos, or its photos cannot be kept in that folder; names the set.
        Stopped: the run was asked to stop.
    """
    if config.cache is False or config.cache == "":
        return
    inner = look_through(data_set)[0]
    while isinstance(inner, Wrapping):
        inner = look_through(inner.dataset)[0]
    if not isinstance(inner, (ImageFolder, EncodedPairs)):
        raise ConfigError(
            f"data.cache is given, and {name} is a {type(inner).__name__}: only photos are kept, of an ImageFolder, "
            "ArrowFiles, HuggingFace or TarShards. Leave data.cache out."
        )
    heartbeat = run._session.heartbeat

    def tell(done: int, count: int) -> None:
        heartbeat.mark("prepare")
        if heartbeat.stop_reason is not StopReason.NONE:
            raise Stopped(heartbeat.stop_reason)

    folder = None if config.cache is True else Path(config.cache)
    try:
        inner.use_cache(folder, workers=config.workers, tell=tell)
    except ConfigError as error:
        raise ConfigError(f"data.cache is given, but for {name} it cannot be: {error}") from error
    if run.is_main and inner.cache is not None:
        logger.info("Photos of %s are read decoded, from %s", name, inner.cache.file)
