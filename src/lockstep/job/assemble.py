"""Makes a job's objects from its configuration, in the order in which they must be applied."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep.data import SkipBroken, check_labels
from lockstep.errors import ConfigError
from lockstep.job.component import Component
from lockstep.job.config import JobConfig
from lockstep.job.config_places import with_lengths
from lockstep.job.instantiate import importable_from, instantiate
from lockstep.job.kept_photos import keep_photos
from lockstep.job.made_model import make_model
from lockstep.job.run_folder import run_folder
from lockstep.loggers import Logger, open_loggers
from lockstep.models import freeze, load_weights
from lockstep.run import Run, RunOptions
from lockstep.run.balancing import balance
from lockstep.seeding import derive_seed
from lockstep.strategy_options import OPTIONS
from lockstep.trainer import Prepared, Rhythm, Trainer
from lockstep.world import World

logger = logging.getLogger(__name__)
_CLASSIFYING = (nn.CrossEntropyLoss, nn.NLLLoss)


def assemble(config: JobConfig, world: World, *, profile: str = "") -> Trainer:
    """The trainer of a job, ready to run. Collective: every rank must call this.

    Args:
        config: the job.
        world: who this process is.
        profile: the steps that are written into a timeline, as FIRST:COUNT; none by default.
    """
    importable_from(config.code)
    run = Run(dataclasses.replace(run_options(config), profile=profile), world)
    training_set, validation_set = _data_sets(config, run)
    model = _model(config, run.is_main)
    _check_classes(config, (training_set, validation_set))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = instantiate(config.optimizer, trainable, name="optimizer")
    steps = run.steps_per_epoch(training_set, model=model, drop_last=config.training.drop_last)
    scheduler = _scheduler(config, optimizer, steps)
    loss = instantiate(config.loss, name="loss")
    balance(run, model, training_set)
    model, optimizer, scheduler = run.prepare(
        model, optimizer, scheduler, values_from_main=bool(config.weights.path)
    )
    parts = Prepared(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=loss,
        classifies=isinstance(loss, _CLASSIFYING),
        training_set=training_set,
        validation_set=validation_set,
        workers=config.data.workers,
    )
    return Trainer(run, parts, config.training, _rhythm(config), _loggers(config, run))


def run_options(config: JobConfig) -> RunOptions:
    """The part of a job's configuration that the handle needs."""
    training = config.training
    return RunOptions(
        global_batch=training.global_batch,
        micro_batches=training.micro_batches,
        evaluation_batch=training.evaluation_batch,
        seed=training.seed,
        strategy=training.strategy,
        mesh=training.mesh,
        **{name: getattr(config, name) for name in OPTIONS},
        reduce=training.reduce,
        powersgd_rank=training.powersgd_rank,
        precision=training.precision,
        channels_last=training.channels_last,
        compile=training.compile,
        sync_batch_norm=training.sync_batch_norm,
        running_buffers=training.running_buffers,
        fingerprint_every=training.fingerprint_every,
        threads=config.run.threads,
        prefetch=config.data.prefetch,
        loader_timeout=config.data.timeout,
        timeout=config.run.timeout,
        directory=run_folder(config),
        resume=config.checkpoint.resume,
        force_context=config.checkpoint.force_context,
        keep=config.checkpoint.keep,
        save_in_background=config.checkpoint.background,
    )


def _data_sets(config: JobConfig, run: Run) -> tuple[Any, Any]:
    data = config.data
    training_set = instantiate(data.train, name="data.train")
    keep_photos(training_set, "data.train", data, run)
    if data.on_bad_sample == "skip":
        training_set = SkipBroken(training_set)
    if data.validation is None:
        return training_set, None
    validation_set = instantiate(data.validation, name="data.validation")
    keep_photos(validation_set, "data.validation", data, run)
    return training_set, validation_set


def _model(config: JobConfig, reads_weights: bool) -> nn.Module:
    """The model with its first weights: from the seed on every rank, then from a file on the main one alone."""
    torch.manual_seed(derive_seed(config.training.seed, "weights"))
    model = make_model(config.model)
    if config.weights.path and reads_weights:
        logger.info("%s", load_weights(model, config.weights.path).describe())
    if config.weights.freeze:
        freeze(model, config.weights.freeze, freeze_statistics=config.weights.freeze_statistics)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("weights.freeze leaves no parameter to train. Thaw some, for example with '!fc'.")
    return model


def _check_classes(config: JobConfig, data_sets: Sequence[Any]) -> None:
    """Compares every label with the number of classes that the model was asked for, where both are known."""
    classes = config.model.args.get("num_classes")
    if isinstance(classes, int):
        for data_set in data_sets:
            if data_set is not None:
                check_labels(data_set, classes)


def _scheduler(config: JobConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    if isinstance(config.schedule, Component):
        component = with_lengths(
            config.schedule, epochs=config.training.epochs, steps_per_epoch=steps_per_epoch
        )
        return instantiate(component, optimizer, name="schedule")
    schedule = config.schedule.schedule(epochs=config.training.epochs, steps_per_epoch=steps_per_epoch)
    return LambdaLR(optimizer, schedule.factor)


def _rhythm(config: JobConfig) -> Rhythm:
    return Rhythm(
        save_every_epochs=config.checkpoint.every_epochs,
        save_every_steps=config.checkpoint.every_steps,
        log_every=config.log.every,
    )


def _loggers(config: JobConfig, run: Run) -> Logger:
    names = [
        *(["console"] if config.log.progress else []),
        *(["jsonl"] if config.log.json else []),
        *(["tensorboard"] if config.log.tensorboard else []),
    ]
    directory = Path(run.options.directory) if run.options.directory is not None else None
    position = run.position
    open_epoch = position.epoch if position.inside else None
    return open_loggers(run.world, directory, names, first_step=position.step, open_epoch=open_epoch)
