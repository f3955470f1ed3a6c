"""``lockstep predict``: the outputs of a run's model for every sample of a data set, in order, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options, shortcut
from lockstep.cli.train import require_no_launcher, resolve_devices, with_devices_of_process
from lockstep.config.checks import KeyPath, refuse
from lockstep.config.components import Component
from lockstep.config.job import JobConfig
from lockstep.config.job_file import map_values
from lockstep.config.rules import job_problems
from lockstep.errors import ConfigError
from lockstep.job.run_folder import read_starts
from lockstep.launch import EntryTarget, LaunchOptions, supervise

ENTRY = "lockstep.job.prediction:main"
_SUFFIXES = (".csv", ".parquet")


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("run", "RUN", str, "a run folder, such as runs/flowers-001"),
        ("--data", "DIR", str, "folder of the data (default: what the run was evaluated on)"),
        *(shortcut(name) for name in ("devices", "strategy", "mesh")),
        ("--out", "FILE", str, ".csv or .parquet (default: predictions.csv in the run folder)"),
        ("--best", "", False, "use the best checkpoint instead of the last weights"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Starts the ranks, of which the first writes the table; returns the exit status."""
    require_no_launcher()
    folder = Path(arguments.run)
    config = _placed(read_starts(folder)[-1].job, arguments)
    data_set = data_of(config, arguments.data)
    out = _out(folder, arguments.out)
    if not (folder / "model.safetensors").is_file() and not any(folder.glob("step-*")):
        raise ConfigError(f"'{folder}' has no weights and no checkpoint. Train it: --resume {folder}.")
    devices = resolve_devices(config)
    payload = {
        "config": with_devices_of_process(config, devices).to_json(),
        "data": [data_set.target, data_set.args],
        "run": str(folder.resolve()),
        "best": arguments.best,
        "out": str(out),
    }
    run = config.run
    options = LaunchOptions(
        devices=devices,
        threads=run.threads,
        portable=bool(config.training.portable),
        grace=run.grace,
        stall_limit=run.stall_limit,
    )
    return supervise(EntryTarget(entry=ENTRY, payload=payload), options)


def _placed(job: JobConfig, arguments: argparse.Namespace) -> JobConfig:
    """The job on the devices that are asked for. Raises ``ConfigError`` where it does not fit them."""
    training = {name: getattr(arguments, name) for name in ("strategy", "mesh")}
    given = {name: value for name, value in training.items() if value is not None}
    if given.get("strategy", "hybrid") != "hybrid":
        given = {"mesh": "", **given}
    table = json.loads(job.to_json())
    table.setdefault("training", {}).update(given)
    devices = {} if arguments.devices is None else {"devices": arguments.devices}
    table.setdefault("run", {}).update({"name": "", **devices})
    # Nothing is resumed, and nothing goes into the run's folder by itself.
    table.setdefault("checkpoint", {}).update(resume="")
    table.setdefault("weights", {}).update(path="")
    config = JobConfig.from_json(json.dumps(table))
    refuse(job_problems(config))
    return config


def data_of(config: JobConfig, root: str | None) -> Component:
    """The data set to predict: that of the evaluation, or the same set in another folder.

    Of an ``ImageFolder`` all photos of the folder are read, in whatever class, with the evaluation's transform.

    Raises:
        ConfigError: the job evaluates nothing, its data is in no folder, or there is no such folder.
    """
    component = config.data.validation
    if component is None:
        raise ConfigError(
            "The job has no [data.validation], which says how samples are read that are not trained on. Predict in a "
            "script of your own: run.predict(dataset)."
        )
    if root is None:
        return component
    if not Path(root).exists():
        raise ConfigError(f"--data {root}: there is no such folder.")
    # torchvision's ImageFolder may have a loader of the user's, which reads photos in another way
    if component.target.rpartition(":")[2] == "ImageFolder" and "loader" not in component.args:
        kept = ("transform", "size", "max_file_size")
        args = {"root": str(Path(root).resolve()), **{k: v for k, v in component.args.items() if k in kept}}
        return Component(target="lockstep.data:PhotoFiles", args=args)
    old, new = config.data.root, str(Path(root).resolve())

    def below_root(value: Any, _: KeyPath) -> Any:
        is_below = old and isinstance(value, str) and f"{value}/".startswith(f"{old}/")
        return new + value[len(old) :] if is_below else value

    moved = map_values(below_root, component.args)
    if moved == component.args and new != old:
        raise ConfigError(
            f"--data {root}: the data set of job {config.job!r} does not read from a folder {{data}}. Write {{data}} "
            "into its path in [data.validation] and train with --data; or load the weights in a script of your own and "
            "call run.predict(dataset)."
        )
    return dataclasses.replace(component, args=moved)


def _out(folder: Path, asked: str | None) -> Path:
    """The file to write. Raises ``ConfigError`` where it cannot be, before anything is computed."""
    path = folder / "predictions.csv" if asked is None else Path(asked)
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--out {path} should end in {' or '.join(_SUFFIXES)}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: the folder {path.parent} does not exist.")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError("--out in Parquet needs pyarrow. Install it (pip install pyarrow), or write .csv.")
    return path
