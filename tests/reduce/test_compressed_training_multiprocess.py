"""Whole trainings with gradients that are rounded or compressed, against the same recipe with exact sums."""

import logging
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.jobs import sgd
from tests.strategies.training import parameters_after
from torch import nn

import lockstep
from lockstep.data import Digits
from lockstep.models import digits_net
from lockstep.trainer import Accuracy

EPOCHS = 12


def parameters_of_ways(world, job, ways):
    return {reduce: parameters_after(world, job, {"reduce": reduce, **options}) for reduce, options in ways}


def parameters_of_jobs(world, jobs, ways):
    return {job: parameters_of_ways(world, job, ways) for job in jobs}


@pytest.mark.slow
def test_mixed_types_channels_last_and_parameters_that_are_not_always_used():
    layout = {"channels_last": True}
    ways = (("ordered", layout), ("bf16", layout), ("powersgd", {"powersgd_rank": 1, **layout}))
    ranks = run_ranks(parameters_of_jobs, 3, ("mixed", "experts"), ways)
    for job, found in ranks[0].items():
        assert 0 < distance(found["bf16"], found["ordered"]) < 5e-3
        assert 0 < distance(found["powersgd"], found["ordered"]) < 0.2
        assert all(torch.equal(other[job][way], found[way]) for other in ranks for way in found)


@cache
def after_digits(world_size):
    ways = (("ordered", {}), ("bf16", {}), ("powersgd", {"powersgd_rank": 2}))
    return run_ranks(parameters_of_ways, world_size, "digits", ways)


def distance(found, expected):
    """Euclidean distance of all parameters, relative to their length."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("reduce", "bound"), [("bf16", 5e-3), ("powersgd", 0.2)])
@pytest.mark.slow
def test_parameters_stay_near_those_of_exact_sums(world_size, reduce, bound):
    """After 14 steps of the digits with momentum."""
    for found in after_digits(world_size):
        assert torch.equal(found[reduce], after_digits(world_size)[0][reduce]), "ranks differ"
        assert 0 < distance(found[reduce], found["ordered"]) < bound


def right_answers(world, ways):
    """The share of right answers on the digits' validation set after a whole training, by reducer."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return {reduce: train_digits(reduce) for reduce in ways}


def train_digits(reduce):
    torch.manual_seed(0)
    run = lockstep.init(global_batch=128, micro_batches=8, seed=0, reduce=reduce)
    model = digits_net()
    optimizer = sgd(model, lr=0.1, weight_decay=5e-4, nesterov=True)
    steps = EPOCHS * run.steps_per_epoch(Digits("train"), model=model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(Digits("train")):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    right = run.evaluate(Digits("validation"), Accuracy())
    run.close()
    return right


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_digits_are_read_as_well_within_one_point(world_size):
    ways = ("ordered", "bf16", "powersgd")
    for found in run_ranks(right_answers, world_size, ways):
        assert found["ordered"] > 0.96
        assert found["bf16"] > found["ordered"] - 0.01
        assert found["powersgd"] > found["ordered"] - 0.01
