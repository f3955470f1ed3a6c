"""Makes a job's objects from its configuration, in the order in which they must be applied.

run -> data sets (photos decoded once, if asked for) -> model and weights -> optimizer, scheduler, loss
    -> where the model is cut, if that is measured -> run.prepare -> Trainer
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.config.components import Component
from lockstep.config.job import DataConfig, JobConfig, ParametersConfig
from lockstep.config.job_file import with_lengths
from lockstep.core.generators import encoded_states, set_encoded_states
from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.core.seeding import derive_seed
from lockstep.core.world import World
from lockstep.data import SkipBroken, StepLoader, adopt, check_labels
from lockstep.data.images.decoding import decoded_as
from lockstep.data.images.encoded import EncodedPairs
from lockstep.data.labels import differing_classes, differing_columns, known_classes
from lockstep.data.naming import unwrap_subset
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.job.instantiate import importable_from, instantiate, instantiate_function
from lockstep.job.run_folder import run_folder
from lockstep.loggers import Logger, open_loggers
from lockstep.models import freeze, load_weights
from lockstep.models.weights import describe_frozen, selected
from lockstep.run import Run
from lockstep.run.loaders import smallest_micro_batch
from lockstep.run.step import ForwardPass
from lockstep.runtime.control import Stopped, StopReason
from lockstep.strategies.layers import ModelParallel
from lockstep.strategies.pipeline import Pipeline
from lockstep.text import grouped, plural, shorten
from lockstep.trainer import Accuracy, Trainer, TrainingParts

logger = logging.getLogger(__name__)


def build_model(config: JobConfig) -> nn.Module:
    """Makes the model of a job, from its seed; ``ConfigError`` where that is no ``torch.nn.Module``."""
    torch.manual_seed(derive_seed(config.training.seed, "weights"))
    component = config.model
    model = instantiate(component, name="model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {component.target} made a {type(model).__name__}, not a torch.nn.Module.")
    return model


def data_to_predict(config: JobConfig, component: Component) -> Any:
    """A data set for the model of a run; one that draws random numbers when it is made draws those of the training.

    They come after the numbers that the training set draws, and after ``Run`` has seeded the generators.
    """
    before = encoded_states()
    data_set = instantiate(component, name="data.validation")
    if encoded_states() != before:
        set_encoded_states(before)
        instantiate(config.data.train, name="data.train")
        data_set = instantiate(component, name="data.validation")
    return data_set


def use_image_cache(data_set: Any, name: str, config: DataConfig, run: Run) -> None:
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
        ConfigError: the set holds no photos, or its photos cannot be kept in that folder; names the set.
        Stopped: the run was asked to stop.
    """
    if config.cache is False or config.cache == "":
        return
    inner = unwrap_subset(data_set)[0]
    while isinstance(inner, Wrapping):
        inner = unwrap_subset(inner.dataset)[0]
    if not isinstance(inner, EncodedPairs):
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
        workers = config.loader_processes(run.options.threads or 1, run.world.local_world_size)
        inner.use_cache(folder, workers=workers, tell=tell)
    except ConfigError as error:
        raise ConfigError(f"data.cache is given, but for {name} it cannot be: {error}") from error
    if run.is_main and inner.cache is not None:
        logger.info("Photos of %s are read decoded, from %s", name, inner.cache.file)


def balance(run: Run, model: nn.Module, training_set: Any) -> None:
    """Finds the cuts of a strategy whose option ``balance`` is ``time``; does nothing for others. Collective.

    Rank 0 runs the first micro-batch of training through the model a few times, in evaluation mode, and all ranks take
    what it finds. Where a model is cut changes no result, so measuring does not either.

    Args:
        run: the handle, before ``prepare``.
        model: the whole model.
        training_set: what ``run.batches`` will be given.

    Raises:
        ConfigError: on every rank; the model has too few parts, or takes its batches by keyword.
    """
    strategy = run.strategy
    if not isinstance(strategy, ModelParallel | Pipeline) or not strategy.partition.missing:
        return
    points, problem = [], ""
    try:
        if run.is_main:
            forward_pass = ForwardPass(model, run._precision, run.device, run.options.channels_last)
            inputs = _first_inputs(run, forward_pass, training_set)
            with forward_pass.autocast():
                points = strategy.partition.measure(model, inputs)
    except ConfigError as error:
        problem = str(error)
    points, problem = gather_json([points, problem], run._session.group, run.device)[0]
    if problem:
        raise ConfigError(problem)
    strategy.partition.points = points


def sample_plan(config: JobConfig, data_set: Any, model: nn.Module | None = None) -> SamplePlan:
    """The sample plan of a job's training set.

    The model decides over a last micro-batch of one sample; it is made where that matters and none is given.
    """
    source, training = adopt(data_set), config.training
    shape = BatchShape(global_batch=training.global_batch, micro_batches=training.micro_batches)
    samples, smallest = len(source.dataset), 1
    if samples % shape.micro_batch_size == 1:
        smallest = smallest_micro_batch(model if model is not None else build_model(config))
    return SamplePlan(
        samples=samples,
        shape=shape,
        seed=training.seed,
        shuffle=source.shuffle is not False,
        drop_last=training.drop_last or bool(source.drop_last),
        smallest_micro_batch=smallest,
    )


def _first_inputs(run: Run, forward_pass: ForwardPass, training_set: Any) -> tuple[Any, ...]:
    """The model's arguments for the first micro-batch of training, on the device."""
    source = run._loaders.source(training_set)
    plan = run._loaders.plan(training_set, True, False, smallest_micro_batch(forward_pass.model))
    with closing(StepLoader(source.dataset, plan, seed=run.options.seed, collate=source.collate)) as loader:
        data = next(loader.batches(0)).micro_batches[0].data
    inputs, named, _ = forward_pass.inputs(data, source.device_transform)
    if named:
        raise ConfigError(
            "balance='time' runs a micro-batch through the layers one by one, and this model takes its batches by "
            "keyword. Let samples be pairs (input, target), or use balance='bytes'."
        )
    return inputs


def assemble(config: JobConfig, world: World, *, profile: str = "") -> Trainer:
    """The trainer of a job, ready to run. Collective: every rank must call this.

    Args:
        config: the job.
        world: who this process is.
        profile: the steps that are written into a timeline, as FIRST:COUNT; none by default.
    """
    importable_from(config.code)
    run = Run(config.run_options(run_folder(config), profile), world)
    training_set, validation_set = _data_sets(config, run)
    model = _model(config, run.is_main)
    check_classes(config, (training_set, validation_set))
    steps = run.steps_per_epoch(training_set, model=model, drop_last=config.training.drop_last)
    optimizer, scheduler, loss, metrics = build_recipe(config, model, steps)
    for number, each in enumerate(config.callbacks):
        run.add_callback(instantiate(each, name=f"callbacks.{number}"))
    balance(run, model, training_set)
    average = []
    if config.training.ema_decay is not None:
        update = get_ema_multi_avg_fn(config.training.ema_decay)  # type: ignore[no-untyped-call]  # torch's
        average.append(AveragedModel(model, multi_avg_fn=update))
    if config.training.checkpoint_activations:  # only of the model: the average is never trained
        _checkpoint_activations(model, config.training.checkpoint_activations)
    model, optimizer, scheduler, *averages = run.prepare(
        *(model, optimizer, scheduler, *average), values_from_main=bool(config.weights.path)
    )
    # Known already when job.json is written
    run.require_prepared().state.reads_photos(decoded_as(adopt(training_set).dataset))
    accuracy = Accuracy.of(loss)
    parts = TrainingParts(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=loss,
        average=averages[0] if averages else None,
        metrics=metrics,
        accuracy=accuracy,
        training_set=training_set,
        validation_set=validation_set,
        workers=config.data.loader_processes(config.run.threads, world.local_world_size),
        judged=repr((accuracy or config.loss, config.data.validation, config.metrics.get("accuracy"))),
    )
    logger = _loggers(config, run)
    return Trainer(run, parts, config.training, config.checkpoint, config.log.every, logger)


def build_recipe(
    config: JobConfig, model: nn.Module, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, Any, Any, dict[str, Any]]:
    """Makes the optimizer, the scheduler, the loss and the metrics of a job; ``ConfigError`` names what cannot be."""
    groups = _parameter_groups(model, config.parameters, lr=config.optimizer.args.get("lr"))
    optimizer = instantiate(config.optimizer, groups, name="optimizer")
    scheduler = _scheduler(config, optimizer, steps_per_epoch)
    loss = instantiate_function(config.loss, ("loss",))
    metrics = {name: instantiate_function(each, ("metrics", name)) for name, each in config.metrics.items()}
    return optimizer, scheduler, loss, metrics


def _parameter_groups(
    model: nn.Module, settings: ParametersConfig, *, lr: float | None
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The trained parameters in the groups that an optimizer takes; as a plain list where all have the same settings.

    Args:
        model: the whole model.
        settings: which parameters differ, and in what.
        lr: the optimizer's learning rate, which ``layer_decay`` multiplies.

    Raises:
        ConfigError: patterns that match no trained parameter.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    options: dict[str, dict[str, float]] = {name: {} for name in trained}
    if settings.layer_decay is not None and lr is not None:
        depth = _block_numbers([name for name, _ in model.named_parameters()])
        last = max(depth.values())
        for name, given in options.items():
            given["lr"] = lr * settings.layer_decay ** (last - depth[name])
    if settings.decay == "matrices":
        for name, each in trained.items():
            if each.dim() < 2:
                options[name]["weight_decay"] = 0.0
    for number, group in enumerate(settings.groups):
        names = [name for name in trained if selected(name, group.names)]
        if not names:
            raise ConfigError(
                f"parameters.groups.{number}.names {list(group.names)} match no parameter that is trained. The first "
                f"ones are {shorten(trained, 8)}."
            )
        given = {key: value for key in ("lr", "weight_decay") if (value := getattr(group, key)) is not None}
        for name in names:
            options[name] |= given
    if not any(options.values()):
        return list(trained.values())
    groups = grouped((tuple(sorted(options[name].items())), each) for name, each in trained.items())
    return [{"params": held, **dict(given)} for given, held in groups.items()]


def _block_numbers(names: Sequence[str]) -> dict[str, int]:
    """The block of each parameter, by its name: 0 for what comes before the first block, such as embeddings.

    A block is what has a number in its name, as ``layers.3``; what comes after the last one, such as a head, is the
    last. In a model without numbers each part of the first level is a block.
    """
    numbered = [re.match(r"(.*?\.)?\d+(?=\.)", name) for name in names]
    if not any(numbered):
        parts = list(dict.fromkeys(name.partition(".")[0] for name in names))
        return {name: parts.index(name.partition(".")[0]) for name in names}
    blocks = list(dict.fromkeys(found.group() for found in numbered if found))
    result, current = {}, 0
    ends = max(number for number, found in enumerate(numbered) if found)
    for number, (name, found) in enumerate(zip(names, numbered)):
        current = blocks.index(found.group()) + 1 if found else current
        result[name] = current if number <= ends else len(blocks) + 1
    return result


def _checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> None:
    """Has modules computed again in the backward pass instead of keeping what they computed, by patterns of names.

    Of modules within each other, the outermost is. ``ConfigError`` where none matches.
    """
    chosen: list[str] = []
    for name, module in model.named_modules():
        if name and selected(name, patterns) and not any(name.startswith(f"{each}.") for each in chosen):
            chosen.append(name)
            checkpoint(module)
    if not chosen:
        raise ConfigError(
            f"training.checkpoint_activations: {list(patterns)} match no module. The model consists of "
            f"{shorten(name for name, _ in model.named_children())}."
        )


def _data_sets(config: JobConfig, run: Run) -> tuple[Any, Any]:
    data = config.data
    training_set = instantiate(data.train, name="data.train")
    use_image_cache(training_set, "data.train", data, run)
    if data.on_bad_sample == "skip":
        training_set = SkipBroken(training_set)
    if data.validation is None:
        return collated(training_set, data), None
    validation_set = instantiate(data.validation, name="data.validation")
    if len(adopt(validation_set).dataset) == 0:
        raise ConfigError("data.validation has no samples. Look at how it was split, or leave it out.")
    use_image_cache(validation_set, "data.validation", data, run)
    return collated(training_set, data), collated(validation_set, data)


def collated(data_set: Any, config: DataConfig) -> Any:
    """A data set with the collate function of the job, where it has one."""
    if config.collate is None:
        return data_set
    collate = instantiate_function(config.collate, ("data", "collate"))
    return dataclasses.replace(adopt(data_set), collate=collate)


def _model(config: JobConfig, reads_weights: bool) -> nn.Module:
    """The model with its first weights: from the seed on every rank, then from a file, only on the main one."""
    model = build_model(config)
    if config.weights.path and reads_weights:
        logger.info("%s", load_weights(model, config.weights.path).describe())
    if config.weights.freeze:
        trained = freeze(model, config.weights.freeze, freeze_statistics=config.weights.freeze_statistics)
        if reads_weights:
            logger.info("%s", describe_frozen(model, trained))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("weights.freeze leaves no parameter to train. Thaw some, for example with '!fc'.")
    return model


def check_classes(config: JobConfig, data_sets: Sequence[Any]) -> None:
    """Compares what labels and columns of the data sets mean, and labels with the model's classes, where known."""
    trained, evaluated = (each and adopt(each).dataset for each in data_sets)
    if differ := differing_columns(trained, evaluated) or differing_classes(trained, evaluated):
        raise ConfigError(differ)
    classes = config.model.args.get("num_classes")
    if isinstance(classes, int):
        for data_set in data_sets:
            if data_set is not None:
                check_labels(adopt(data_set).dataset, classes)
        names = known_classes(trained)
        if names and len(names) < classes:
            logger.warning(
                "model.num_classes is %d and the training set has %s (%s), so scores are left over, and lockstep "
                "predict cannot name them. Set model.num_classes=%d.",
                *(classes, plural(len(names), "class"), shorten(names, 8), len(names)),
            )


def _scheduler(config: JobConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    training = config.training
    steps = training.steps(steps_per_epoch)
    if training.max_steps is not None and steps < training.max_steps:
        epochs = math.ceil(training.max_steps / steps_per_epoch)
        raise ConfigError(
            f"training.max_steps is {training.max_steps}, but training.epochs={training.epochs} are {steps} steps "
            f"only. Set training.epochs={epochs}, or leave max_steps out."
        )
    if not isinstance(config.schedule, Component):
        schedule = config.schedule.schedule(steps=steps, steps_per_epoch=steps_per_epoch)
        if schedule.warmup_steps > steps:
            raise ConfigError(
                f"schedule: the warm-up has {schedule.warmup_steps} steps and the run {steps}, so it would never end. "
                "Make it shorter, or the run longer."
            )
        return LambdaLR(optimizer, schedule.factor)
    component = with_lengths(config.schedule, epochs=training.epochs, steps=steps, steps_per_epoch=steps_per_epoch)
    given = [group["lr"] for group in optimizer.param_groups]
    scheduler = instantiate(component, optimizer, name="schedule")
    if (total := getattr(scheduler, "total_steps", steps)) < steps:
        raise ConfigError(
            f"schedule: {component.target} ends after {total} steps, and the run has {steps}. Give it '{{steps}}'."
        )
    set_to = [group["lr"] for group in optimizer.param_groups]
    if len(set(given)) > 1 and len(set(set_to)) == 1 and set_to[0] != 0:
        raise ConfigError(
            f"schedule: {component.target} gives all parameters one learning rate, and parameters.groups or "
            "layer_decay give them several. Use a scheduler that multiplies them, or kind = 'cosine'."
        )
    return scheduler


def _loggers(config: JobConfig, run: Run) -> Logger:
    log = config.log
    wanted = {"console": log.progress, "jsonl": log.json, "csv": log.csv, "tensorboard": log.tensorboard}
    trackers = {"wandb": log.wandb, "mlflow": log.mlflow}
    directory = Path(run.options.directory) if run.options.directory is not None else None
    position = run.position
    return open_loggers(
        *(run.world, directory, [name for name, is_wanted in wanted.items() if is_wanted]),
        first_step=position.step,
        open_epoch=position.epoch if position.inside else None,
        trackers={name: given for name, given in trackers.items() if given},
        settings=json.loads(config.to_json()),
    )
