"""Level C: the accuracy on digits is that of one device, within one point."""

import logging
import math
from functools import cache
from statistics import mean

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

from lockstep.data import Digits
from lockstep.models import digits_net
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler
from lockstep.strategies import IndependentStrategy

POINT, STEPS_PER_EPOCH = 0.01, 12
ASYNCHRONOUS = {
    "strategy": "parameter_server",
    "parameter_server": {"mode": "asynchronous", "staleness": 4, "snapshot_every": 0},
}


def right(output, target):
    return output.argmax(1) == target


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracies(world, make, options, epochs, seeds):
    """The accuracy after some epochs, for each seed, and how stale the gradients were."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return [accuracy(world, make, options, epochs, seed) for seed in seeds]


def accuracy(world, make, options, epochs, seed):
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, epochs))
    recipe = {"global_batch": 128, "micro_batches": 8, "seed": seed, "threads": 1}
    run = Run(RunOptions.of(**recipe, **options), world)
    _, optimizer, schedule = run.prepare(model, optimizer, schedule)
    train = Digits("train")
    for _ in run.epochs(epochs):
        for batch in run.batches(train):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    found = run.evaluate(Digits("validation"), right)
    metrics = run.strategy.metrics() if isinstance(run.strategy, IndependentStrategy) else {}
    stale = metrics.get("staleness", 0.0)  # the server's
    run.close()
    return found, stale


def factor(step, epochs):
    """One epoch of warming up, then a cosine to a hundredth."""
    turn = max(0, step - STEPS_PER_EPOCH) / max(1, (epochs - 1) * STEPS_PER_EPOCH)
    return min(1.0, (step + 1) / STEPS_PER_EPOCH) * (0.01 + 0.99 * (1 + math.cos(math.pi * turn)) / 2)


@cache
def of_one_device(make, epochs, seeds):
    return run_ranks(accuracies, 1, make, {"strategy": "single"}, epochs, seeds, timeout=600)[0]


def compared(make, workers, epochs, seeds):
    alone = of_one_device(make, epochs, seeds)
    found = run_ranks(accuracies, workers + 1, make, ASYNCHRONOUS, epochs, seeds, timeout=600)[0]
    assert all(stale > 0 for _, stale in found), "no gradient was stale, so nothing was tried"
    return mean(value for value, _ in alone), mean(value for value, _ in found)


@pytest.mark.slow
def test_a_perceptron_is_as_accurate_with_two_asynchronous_workers():
    alone, found = compared(perceptron, 2, 8, (0,))
    assert alone > 0.9
    assert abs(found - alone) <= POINT


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_digits_network_is_as_accurate_with_asynchronous_workers(workers):
    """The recipe of the built-in job, four seeds: a run differs from another of the same seed by half a point."""
    alone, found = compared(digits_net, workers, 20, (0, 1, 2, 3))
    assert alone > 0.96
    assert abs(found - alone) <= POINT
