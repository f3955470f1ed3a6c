"""Lets the time of a forward pass decide where a model is cut, where that was asked for: measured once, by rank 0."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.collectives import gather_json
from lockstep.data import StepLoader
from lockstep.errors import ConfigError
from lockstep.run.compute import Compute
from lockstep.run.feeding import smallest_micro_batch
from lockstep.run.handle import Run
from lockstep.strategies.layers import ModelParallel
from lockstep.strategies.pipeline import Pipeline


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
    if not isinstance(strategy, ModelParallel | Pipeline) or not strategy.cuts.missing:
        return
    points, problem, group = [], "", run._session.group
    try:
        if run.is_main:
            compute = Compute(model, run._precision, run.device, run.options.channels_last)
            inputs = _first_inputs(run, compute, training_set)
            with compute.autocast():
                points = strategy.cuts.measure(model, inputs)
    except ConfigError as error:
        problem = str(error)
    if group is not None:
        points, problem = gather_json([points, problem], group, run.device)[0]
    if problem:
        raise ConfigError(problem)
    strategy.cuts.points = points


def _first_inputs(run: Run, compute: Compute, training_set: Any) -> tuple[Any, ...]:
    """What the model is called with for the first micro-batch of training, on the device."""
    source = run._feeder.source(training_set)
    plan = run._feeder.plan(training_set, True, False, smallest_micro_batch(compute.model))
    loader = StepLoader(source.dataset, plan, seed=run.options.seed, collate=source.collate)
    try:
        data = next(loader.batches(0)).micro_batches[0].data
    finally:
        loader.close()
    inputs, named, _ = compute.inputs(data, source.finish)
    if named:
        raise ConfigError(
            "balance='time' runs a micro-batch through the layers one by one, and this model takes its batches by "
            "keyword. Let samples be pairs (input, target), or use balance='bytes'."
        )
    return inputs
