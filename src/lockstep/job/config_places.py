"""Fills in what a job file leaves open: ``{data}``, ``{seed}``, and what its relative paths are relative to.

A relative path in a job file starts at the folder of that file, one on the command line (or in a job of
Lockstep's own) at the current folder. A path below ``{data}`` may not leave it with ``..``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from lockstep.errors import nearest
from lockstep.job.component import Component
from lockstep.job.config import JobConfig
from lockstep.job.config_reader import KeyPath, Problem

PLACEHOLDERS = ("data", "seed")
SCHEDULE_PLACEHOLDERS = ("steps", "steps_per_epoch", "epochs")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


def settle(
    config: JobConfig, folder: Path | None, from_command_line: Callable[[KeyPath], bool]
) -> tuple[JobConfig, list[Problem]]:
    """The job with every placeholder and path filled in, and what could not be.

    Args:
        config: the job as it was read.
        folder: that of the job file; None for a built-in job.
        from_command_line: whether the value at a key path was given on the command line.
    """
    config = _absolute(config, folder, from_command_line)
    fill = _Filler(config.data.root, config.training.seed)
    data = dataclasses.replace(
        config.data,
        train=fill.component(config.data.train, ("data", "train")),
        validation=config.data.validation and fill.component(config.data.validation, ("data", "validation")),
    )
    schedule = config.schedule
    if isinstance(schedule, Component):
        schedule = fill.component(schedule, ("schedule",), SCHEDULE_PLACEHOLDERS)
    settled = dataclasses.replace(
        config,
        model=fill.component(config.model, ("model",)),
        data=data,
        loss=fill.component(config.loss, ("loss",)),
        optimizer=fill.component(config.optimizer, ("optimizer",)),
        schedule=schedule,
    )
    return settled, fill.remarks(config)


def _absolute(
    config: JobConfig, folder: Path | None, from_command_line: Callable[[KeyPath], bool]
) -> JobConfig:
    """The job with absolute paths, and the folders of the user's own modules."""

    def place(value: str, *path: str) -> str:
        start = Path.cwd() if folder is None or from_command_line(path) else folder.resolve()
        return str(start / Path(value).expanduser()) if value else ""

    resume = config.checkpoint.resume
    if resume != "auto":
        resume = place(resume, "checkpoint", "resume")
    cache = config.data.cache
    if isinstance(cache, str):
        cache = place(cache, "data", "cache")
    own = [folder.resolve(), Path.cwd()] if folder is not None else [Path.cwd()]
    return dataclasses.replace(
        config,
        code=tuple(dict.fromkeys(map(str, own))),
        data=dataclasses.replace(config.data, root=place(config.data.root, "data", "root"), cache=cache),
        weights=dataclasses.replace(config.weights, path=place(config.weights.path, "weights", "path")),
        checkpoint=dataclasses.replace(config.checkpoint, resume=resume),
    )


def with_lengths(scheduler: Component, *, epochs: int, steps_per_epoch: int) -> Component:
    """A torch scheduler's component with ``{epochs}``, ``{steps}`` and ``{steps_per_epoch}`` filled in."""
    lengths = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "steps": epochs * steps_per_epoch}
    named = {f"{{{name}}}": length for name, length in lengths.items()}

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [fill(item) for item in value]
        return named.get(value, value) if isinstance(value, str) else value

    return Component(target=scheduler.target, args=fill(scheduler.args))


class _Filler:
    """Replaces placeholders in the arguments of components."""

    def __init__(self, root: str, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._problems: list[Problem] = []
        self._reads_folder = False

    def component(self, component: Component, path: KeyPath, later: tuple[str, ...] = ()) -> Component:
        """The component with its placeholders filled in; those in ``later`` are left to the run."""
        return Component(target=component.target, args=self._value(component.args, path, later))

    def remarks(self, config: JobConfig) -> list[Problem]:
        """All problems; one more where a folder was needed and not given, or given and not used."""
        if self._reads_folder and not self._root:
            message = f"is not given: the job {config.job!r} reads a folder of data. Give it with --data DIR."
            return [*self._problems, Problem(("data", "root"), message)]
        if self._root and not self._reads_folder:
            message = f"is {config.data.root!r}, but no argument of job {config.job!r} uses it as '{{data}}'."
            return [*self._problems, Problem(("data", "root"), message)]
        return self._problems

    def _value(self, value: Any, path: KeyPath, later: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._value(item, (*path, key), later) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item, (*path, number), later) for number, item in enumerate(value)]
        found = _PLACEHOLDER.match(value) if isinstance(value, str) else None
        return self._fill(value, found, path, later) if found else value

    def _fill(self, value: str, found: re.Match[str], path: KeyPath, later: tuple[str, ...]) -> Any:
        name, rest = found.group(1), value[found.end() :]
        if name == "data" and (not rest or rest.startswith("/")):
            self._reads_folder = True
            if ".." in PurePath(rest).parts:
                self._problems.append(Problem(path, f"is {value!r}, which leaves the data folder with '..'."))
            return self._root + rest
        if name == "seed" and not rest:
            return self._seed
        if name in later and not rest:
            return value
        if not rest or rest.startswith("/"):
            self._problems.append(
                Problem(
                    path, f"is {value!r}, an unknown placeholder.{nearest(name, (*PLACEHOLDERS, *later))}"
                )
            )
        return value
