"""Training with BatchNorm over the global batch: one result, bit for bit, on 1 to 4 ranks."""

from functools import cache, partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.concurrent_trainings import WAYS, apart, by_hand, furthest, resume, train_ways

from lockstep.config.strategy_options import Level
from lockstep.errors import CheckpointMismatch

SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
QUICK = ("sgd",)
EXACT = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
    for name in WAYS
    if name not in ("bf16 sums", "powersgd")
]


def trained(world_size, name):
    return train_together(world_size, name in QUICK)[name]


@cache
def train_together(world_size, quick):
    names = [name for name in WAYS if (name in QUICK) == quick]
    return run_ranks(train_ways, world_size, names, timeout=120)[0]


@pytest.mark.slow
def test_one_device_takes_the_steps_of_a_plain_loop_over_the_global_batch():
    distance, where = furthest(trained(1, "sgd")[0], run_ranks(by_hand, 1)[0])
    assert 0 < distance < 1e-5, where


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_every_number_of_ranks_has_the_bits_of_one(name, world_size):
    """Losses, norms, gradients, parameters and running statistics of 8 steps, two of them ragged."""
    (found, accuracy, level), (expected, expected_accuracy, _) = trained(world_size, name), trained(1, name)
    assert furthest(found, expected) == (0.0, "nothing")
    assert accuracy == expected_accuracy
    assert level is Level.BITWISE


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_give_the_bits_of_shared_memory(world_size):
    assert furthest(trained(world_size, "collectives")[0], trained(1, "sgd")[0])[0] == 0.0


@pytest.mark.slow
def test_checkpointed_activations_and_other_gradients_of_a_run_are_not_mixed_up():
    """Ways that differ in memory alone have one result; ways that differ in the recipe do not."""
    assert furthest(trained(1, "checkpointed")[0], trained(1, "dropout")[0])[0] == 0.0
    assert furthest(trained(1, "dropout")[0], trained(1, "sgd")[0])[0] > 0.0


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_not_as_another_recipe(tmp_path):
    whole = run_ranks(resume, 1, str(tmp_path / "whole"), 2)[0]
    parts = str(tmp_path / "parts")
    run_ranks(resume, 2, parts, 1)
    with pytest.raises(CheckpointMismatch, match="sync_batch_norm: True there, False here"):
        run_ranks(partial(resume, sync_batch_norm=False), 2, parts, 2)
    for state in run_ranks(resume, 3, parts, 2):
        assert list(state) == list(whole)
        for name, tensor in whole.items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "bound", "promised"),
    [
        ("bf16 sums", 5e-3, Level.TOLERANCE),
        ("powersgd", 0.2, Level.STATISTICAL),
    ],
)
def test_compressed_gradients_go_with_it(name, bound, promised, world_size):
    steps, _, level = trained(world_size, name)
    assert level is promised
    assert 0 < apart(steps, trained(1, "sgd")[0]) < bound
