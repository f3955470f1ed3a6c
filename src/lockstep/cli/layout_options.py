"""The options by which ``verify`` and ``scale`` are told what to run a job on, and the job as one device runs it."""

from __future__ import annotations

import argparse

from lockstep.cli import train
from lockstep.errors import ConfigError, nearest
from lockstep.job.config import JobConfig
from lockstep.job.config_file import load_job
from lockstep.strategy_options import STRATEGIES


def device_counts(text: str) -> list[int]:
    """The numbers of ``--devices 1,2,4``, as they stand; none if it was not given.

    Raises:
        ConfigError: one is not a number of devices.
    """
    words = _words(text)
    if any(not word.isdecimal() or int(word) < 1 for word in words):
        raise ConfigError(f"--devices {text!r} is not a list of numbers. Write for example --devices 1,2,4.")
    return [int(word) for word in words]


def strategy_names(text: str) -> list[str]:
    """The names of ``--strategies ddp,fsdp``, as they stand; none if it was not given.

    Raises:
        ConfigError: one is not known.
    """
    names = _words(text)
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"strategy {name!r} is not known.{nearest(name, STRATEGIES)}")
    return names


def job_on_one_device(job: str, arguments: argparse.Namespace) -> JobConfig:
    """The job with the options of the command line over it, checked as it runs on one device.

    Raises:
        ConfigError: the job or an option is wrong.
    """
    given = argparse.Namespace(**vars(arguments) | {"devices": "1"})
    return load_job(job, train.overrides(given))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
