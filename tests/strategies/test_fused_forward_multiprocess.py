"""Training with BatchNorm over the global batch, on 1 to 4 ranks, against one forward on one device, step by step."""

from functools import cache, partial

import pytest
from tests.ranks import run_ranks
from tests.strategies.fused_forward_trainings import WAYS, apart, by_hand, furthest, resume, train_ways

from lockstep.config.strategy_options import Level
from lockstep.errors import CheckpointMismatch

SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
EXACT = [name for name in WAYS if name not in ("bf16", "fp16", "bf16 sums", "powersgd")]


@cache
def trained(world_size):
    return run_ranks(train_ways, world_size, list(WAYS), timeout=120)[0]


def test_one_device_takes_the_steps_of_a_plain_loop_over_the_global_batch():
    distance, where = furthest(trained(1)["sgd"][0], run_ranks(by_hand, 1)[0])
    assert distance < 1e-5, where


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_every_number_of_ranks_takes_the_steps_of_one(name, world_size):
    """Losses, norms, gradients, parameters and running statistics of 14 steps, two of them ragged."""
    (found, accuracy, level), (expected, expected_accuracy, _) = trained(world_size)[name], trained(1)[name]
    distance, where = furthest(found, expected)
    assert distance < (1e-10 if name == "double" else 1e-5), where
    assert accuracy == expected_accuracy
    assert level is Level.TOLERANCE


@pytest.mark.parametrize("world_size", SIZES)
def test_collectives_give_the_bits_of_shared_memory(world_size):
    assert furthest(trained(world_size)["collectives"][0], trained(world_size)["sgd"][0])[0] == 0.0


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("name", "one_step", "all_steps"), [("bf16", 1e-2, 1e-2), ("fp16", 2e-3, 1e-4)])
def test_in_sixteen_bits_it_is_as_near_as_their_rounding_lets_it_be(name, one_step, all_steps, world_size):
    """A row's output already depends on how many rows a product of matrices has."""
    found, expected = trained(world_size)[name][0], trained(1)[name][0]
    distance, where = furthest(found[:1], expected[:1])
    assert distance < one_step, where
    assert apart(found, expected) < all_steps


def test_a_run_goes_on_with_another_number_of_ranks_and_not_as_another_recipe(tmp_path):
    whole = run_ranks(resume, 1, str(tmp_path / "whole"), 2)[0]
    parts = str(tmp_path / "parts")
    run_ranks(resume, 2, parts, 1)
    with pytest.raises(CheckpointMismatch, match="sync_batch_norm: True there, False here"):
        run_ranks(partial(resume, sync_batch_norm=False), 2, parts, 2)
    for state in run_ranks(resume, 3, parts, 2):
        assert list(state) == list(whole)
        for name, tensor in whole.items():
            distance = (state[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
            assert float(distance) < 1e-5, name


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("name", "bound", "promised"),
    [("bf16 sums", 5e-3, Level.TOLERANCE), ("powersgd", 0.2, Level.STATISTICAL)],
)
def test_compressed_gradients_go_with_it(name, bound, promised, world_size):
    steps, _, level = trained(world_size)[name]
    assert level is promised
    assert 0 < apart(steps, trained(world_size)["sgd"][0]) < bound
