"""Decides which folder a run writes to, and what it goes on from, before any rank starts.

new run             runs/digits-001, runs/digits-002, ...      the next free number, created at once
[run] name = "x"    runs/x                                     refused if it exists and nothing is resumed
resume = "auto"     the latest runs/digits-NNN that has a checkpoint; a new run if there is none
resume = FOLDER     that run folder, written on
resume = CHECKPOINT a new run that starts from it
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig

LOCK = "lock"


def run_folder(config: JobConfig) -> Path:
    """The folder of a run whose name is decided."""
    return Path(config.run.directory).expanduser() / config.run.name


def choose_run_folder(config: JobConfig) -> JobConfig:
    """Creates the run's folder, or takes up the one that is resumed; returns the job with both decided.

    In the job that comes back, ``resume`` is empty, ``auto`` (the newest checkpoint of the run's folder) or
    the path of one checkpoint. ``ConfigError`` if the folder exists or cannot be written.
    """
    resume = config.checkpoint.resume
    if resume == "auto":
        latest = latest_run(config)
        return _placed(config, latest, "auto") if latest else _placed(config, _create(config), "")
    if resume and _has_checkpoint(Path(resume)):
        return _placed(config, Path(resume), "auto")
    return _placed(config, _create(config), resume)


def planned_run_folder(config: JobConfig) -> Path:
    """The folder that `choose_run_folder` would take; creates nothing."""
    resume = config.checkpoint.resume
    latest = latest_run(config) if resume == "auto" else None
    if latest is not None:
        return latest
    if resume and resume != "auto" and _has_checkpoint(Path(resume)):
        return Path(resume)
    return run_folder(config) if config.run.name else _numbered(config, _last_number(config) + 1)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a run folder; the lock goes with this process, however it ends."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"The run folder '{folder}' cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"The run folder '{folder}' is used by a run that is still going on.") from error
    finally:
        os.close(descriptor)


def latest_run(config: JobConfig) -> Path | None:
    """The run of this job with the highest number that has a checkpoint; where it is named, that one."""
    if config.run.name:
        return run_folder(config) if _has_checkpoint(run_folder(config)) else None
    numbers = range(_last_number(config), 0, -1)
    return next((_numbered(config, n) for n in numbers if _has_checkpoint(_numbered(config, n))), None)


def _placed(config: JobConfig, folder: Path, resume: str) -> JobConfig:
    run = dataclasses.replace(config.run, directory=str(folder.parent), name=folder.name)
    return dataclasses.replace(
        config, run=run, checkpoint=dataclasses.replace(config.checkpoint, resume=resume)
    )


def _create(config: JobConfig) -> Path:
    directory = Path(config.run.directory).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if config.run.name:
            run_folder(config).mkdir(exist_ok=config.checkpoint.resume == "auto")
            return run_folder(config)
        return _create_numbered(config)
    except FileExistsError as error:
        raise ConfigError(
            f"The run folder '{error.filename}' exists. Choose another run.name, or go on with --resume."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"No run folder can be made in '{directory}': {os.strerror(error.errno or 0)}. Set run.directory."
        ) from error


def _create_numbered(config: JobConfig) -> Path:
    number = _last_number(config) + 1
    while True:
        folder = _numbered(config, number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _numbered(config: JobConfig, number: int) -> Path:
    return Path(config.run.directory).expanduser() / f"{config.job}-{number:03}"


def _last_number(config: JobConfig) -> int:
    directory = Path(config.run.directory).expanduser()
    pattern = re.compile(re.escape(config.job) + r"-(\d{3,})")
    found = (pattern.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return max((int(match[1]) for match in found if match), default=0)


def _has_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() for path in folder.glob("step-*"))
