"""Runs ``lockstep predict`` in a rank: the model of a run, the outputs for a data set, and a table of them.

index, sample, class, probability_daisy, probability_dandelion, ...      a classifier
index, sample, output_0, output_1, ...                                   any other model
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import checkpoint
from lockstep.checkpoint.folder import newest_step, step_of
from lockstep.config.components import Component
from lockstep.config.job import JobConfig
from lockstep.core.atomic import write_whole
from lockstep.core.generators import generators_kept
from lockstep.core.world import World
from lockstep.data.adopt import adopt
from lockstep.data.formats.arrow_files import optional_module
from lockstep.data.labels import differing_columns, known_classes
from lockstep.data.naming import path_of
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError, LockstepError
from lockstep.job.assemble import balance, build_model, collated, data_to_predict
from lockstep.job.instantiate import importable_from, instantiate, instantiate_function
from lockstep.job.run_folder import read_outcome
from lockstep.models import load_weights
from lockstep.models.weights import metadata_of
from lockstep.run import Run
from lockstep.run.attributes import Attributes
from lockstep.run.prepare import Parts
from lockstep.runtime.output import log_to_terminal, print_result
from lockstep.text import plural, printable, shorten
from lockstep.trainer.state import is_of_classes, is_of_log_probabilities
from lockstep.trainer.trainer import WEIGHTS


def main(payload: Any) -> None:
    """Predicts on this rank.

    Args:
        payload: ``{"config": JSON of the job, "data": [import path, arguments] of the data set, "run": the run folder,
            "best": true for its best checkpoint, "out": the table to write}``.
    """
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    log_to_terminal(logging.WARNING)
    importable_from(config.code)
    target, arguments = payload["data"]
    run = Run(config.run_options(None), world)
    component = Component(target=target, args=arguments)
    data_set = data_to_predict(config, component)
    is_other = run.is_main and component != config.data.validation
    if is_other and (differ := differing_columns(_training_set(config), data_set)):
        raise ConfigError(differ)
    source = collated(data_set, config.data)
    model = build_model(config)
    folder = Path(payload["run"])
    if run.is_main or _keeps_more(model, _steps(folder).values()):
        load_run(model, folder, best=payload["best"])
    balance(run, model, source)
    run.prepare(model, values_from_main=True)
    workers = config.data.loader_processes(config.run.threads, world.local_world_size)
    outputs = run.predict(source, workers=workers)
    run.close()  # the others need not wait for the table
    if outputs is not None:
        names = class_names(folder, config)
        columns = table(outputs, data_set, instantiate_function(config.loss, ("loss",)), names)
        write_table(Path(payload["out"]), columns)
        said = printable(report(columns, payload["out"]))
        if config.training.ema_decay is not None:
            said += "\nThese are of the weights themselves; the log's evaluations are of their moving average."
        print_result(said, f"The table {payload['out']}")


def has_ended(folder: Path) -> bool:
    """True where a run folder has the weights of the run's end, and its newest checkpoint is not of a later step."""
    exported = folder / WEIGHTS
    return exported.is_file() and int(metadata_of(exported).get("step", -1)) >= newest_step(folder)[0]


def has_gone_on(folder: Path) -> bool:
    """True where a run, which ended once, has checkpoints of later steps than the weights of its end."""
    exported = folder / WEIGHTS
    return exported.is_file() and "step" in metadata_of(exported) and not has_ended(folder)


def recorded_fingerprint(folder: Path) -> str:
    """The fingerprint in which a run ended; empty where it has not ended, or has gone on since."""
    outcome = read_outcome(folder)
    return str(outcome.get("fingerprint", "")) if outcome and not has_gone_on(folder) else ""


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run folder by their steps."""
    return {found[0]: path for path in checkpoint.committed(folder) if (found := step_of(path)) is not None}


def load_run(model: nn.Module, folder: Path, *, best: bool) -> None:
    """Loads what a run has learned: the exported weights or a checkpoint, whichever is of a later step; or its best.

    What modules keep beside their weights, as extra state or in attributes that the run has changed, is in checkpoints
    alone. ``CheckpointError`` where there is none that is sound.
    """
    steps, has_weights = _steps(folder), not best and has_ended(folder)
    if has_weights:
        own = steps.get(int(metadata_of(folder / WEIGHTS).get("step", -1)))
        if not _keeps_more(model, [] if own is None else [own]):
            load_weights(model, folder / WEIGHTS, strict_head=True)
            return
        absent = "checkpoint of its last step, for extra state"
        state = None if own is None else checkpoint.read(own)
    elif best:
        record, absent = checkpoint.read_best(folder), "best checkpoint"
        state = checkpoint.read(steps[record.step]) if record is not None and record.step in steps else None
    else:
        restored, absent = checkpoint.read_newest(folder), "weights and no checkpoint"
        state = None if restored is None else restored.state
    if state is None:
        raise CheckpointError(f"'{folder}' has no {absent}.")
    checkpoint.load_model_state(model, state.model, state.aliases)
    parts = Parts(model)
    checkpoint.load_extra_states(parts.named_modules, state.progress.get("extra_states", {}), state.optimizer)
    if lost := Attributes(parts).restore(state.progress, state.optimizer, torch.device("cpu")):
        raise CheckpointMismatch(
            f"The checkpoint's values of {shorten(lost, 3)} do not fit the model that the job makes. Predict with the "
            "code that trained it."
        )


def _keeps_more(model: nn.Module, checkpoints: Iterable[Path]) -> bool:
    """True if weights alone do not make the model what it was in training, as far as these checkpoints tell."""
    return any(map(checkpoint.has_extra_state, model.modules())) or any(
        checkpoint.read_progress(path).get("held") for path in checkpoints
    )


def class_names(folder: Path, config: JobConfig) -> tuple[str, ...]:
    """The names of the classes that a run has trained on: those saved with its weights, else those of its data.

    Empty where its data set has none, or no longer exists.
    """
    saved = metadata_of(folder / WEIGHTS).get("classes") if (folder / WEIGHTS).is_file() else None
    if saved is not None:
        return tuple(json.loads(saved))
    return known_classes(_training_set(config))


def _training_set(config: JobConfig) -> Any:
    """The data that a run has trained on; None where it is not there any more. Draws no random numbers."""
    with generators_kept(), suppress(LockstepError, OSError):
        return instantiate(config.data.train, name="data.train")
    return None


def table(outputs: Tensor, data_set: Any, loss: Any, classes: Sequence[str] = ()) -> dict[str, Any]:
    """The columns of a table of predictions, by name.

    Args:
        outputs: of shape (samples, numbers) or (samples,), on the CPU.
        data_set: names the samples.
        loss: that the model was trained with; it says whether outputs are scores of classes.
        classes: their names, or nothing: they are then numbered.

    Raises:
        ConfigError: the outputs of a sample are not a row of numbers, the classes are not as many, or a sampler chooses
            the samples.
    """
    if isinstance(data_set, DataLoader) and adopt(data_set).dataset is not data_set.dataset:
        raise ConfigError(
            "data.validation is a DataLoader whose sampler draws samples or leaves some out, so rows of a table would "
            "have other samples' numbers. Let it be the data set, or a Subset of it."
        )
    if outputs.dim() > 2:
        raise ConfigError(
            f"The model gives numbers of shape {list(outputs.shape[1:])} for each sample, which is not a row of a "
            "table. Use run.predict in a script of your own."
        )
    rows = outputs.reshape(len(outputs), -1)
    columns: dict[str, Any] = {"index": np.arange(len(rows))}
    paths = [path_of(data_set, index) for index in range(len(rows))]
    if any(paths):
        columns["sample"] = paths
    if not is_of_classes(loss):
        numbers = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return columns | {f"output_{number}": numbers[:, number] for number in range(rows.shape[1])}
    names = list(classes) or [str(number) for number in range(rows.shape[1])]
    if len(names) != rows.shape[1] or len(set(names)) < len(names):
        raise ConfigError(
            f"The model gives {rows.shape[1]} scores for each sample, and the {len(names)} names of classes that are "
            f"known are {shorten(names)}."
        )
    scores = rows.double()
    probabilities = (scores.exp() if is_of_log_probabilities(loss) else scores.softmax(1)).float().numpy()
    has_nan = scores.isnan().any(1).tolist()
    columns["class"] = ["NaN" if unknown else names[label] for label, unknown in zip(rows.argmax(1).tolist(), has_nan)]
    return columns | {f"probability_{name}": probabilities[:, label] for label, name in enumerate(names)}


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes columns as CSV in UTF-8, or as Parquet where the file's name ends so.

    Numbers in CSV are the shortest ones that give the same bits. ``ConfigError`` where the file cannot be written.
    """
    if path.suffix.lower() == ".parquet":
        arrow, parquet = (optional_module(name, "Parquet") for name in ("pyarrow", "pyarrow.parquet"))
        buffer, texts = io.BytesIO(), {name: each for name, each in columns.items() if isinstance(each, list)}
        told = {name: list(map(_in_utf8, each)) for name, each in texts.items()}
        named = {_in_utf8(name): told.get(name, each) for name, each in columns.items()}
        parquet.write_table(arrow.table(named), buffer)
        content = buffer.getvalue()
    else:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        content = text.getvalue().encode(errors="surrogateescape")
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"The predictions cannot be written to {path}: {error.strerror}.") from error


def _in_utf8(name: str) -> str:
    """A name as Parquet can hold it: the bytes of one that is not in UTF-8 are escaped."""
    return name.encode(errors="backslashreplace").decode()


def report(columns: Mapping[str, Any], out: str) -> str:
    """Summarizes the predictions in a few lines."""
    lines = [f"{plural(len(columns['index']), 'sample')} -> {out}"]
    found, counts = np.unique(columns.get("class", []), return_counts=True)
    width = max(map(len, found), default=0)
    lines += [f"  {name:{width}}  {count:,}" for name, count in zip(found, counts, strict=True)]
    return "\n".join(lines)
