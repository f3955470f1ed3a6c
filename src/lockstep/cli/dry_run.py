"""``lockstep train --dry-run``: looks at the data and the model, and prints what would run."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any

from lockstep.errors import ConfigError
from lockstep.job.component import Component
from lockstep.job.config import JobConfig
from lockstep.job.instantiate import importable_from, instantiate
from lockstep.job.run_folder import planned_run_folder
from lockstep.job.summary import Facts, describe
from lockstep.launch.devices import Devices


def print_plan(config: JobConfig, devices: Devices) -> None:
    """Prints what the job would do on these devices; writes no file and starts no process."""
    importable_from(config.code)
    facts = look_at(config, ranks=devices.count)
    sys.stdout.write(describe(config, facts, str(planned_run_folder(config))) + "\n")


def look_at(config: JobConfig, ranks: int) -> Facts:
    """The sizes of the job's data and model; both are made, as far as their signatures allow it."""
    validation = config.data.validation
    from lockstep.job.made_model import make_model  # torch, which what is refused before does not need

    model = make_model(config.model)
    return Facts(
        samples=_length(config.data.train, "data.train"),
        validation_samples=None if validation is None else _length(validation, "data.validation"),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        batch_norm=any(_is_batch_norm(module) for module in model.modules()),
        ranks=ranks,
    )


def _length(component: Component, name: str) -> int:
    dataset = instantiate(component, name=name)
    if not isinstance(dataset, Sized):
        raise ConfigError(f"{name}: {component.target} has no length, so its steps cannot be planned.")
    return len(dataset)


def _is_batch_norm(module: Any) -> bool:
    return any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__)
