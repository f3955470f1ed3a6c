"""Real ranks with unequal shares, one of them empty, against torch's BatchNorm over the whole batch on one device."""

from functools import cache

import pytest
from tests.numerics.sync_batch_norm_cases import CASES, train_all, under_ddp
from tests.ranks import run_ranks


@cache
def trained(world_size):
    return run_ranks(train_all, world_size, list(CASES))


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_one_forward_over_the_whole_batch(name, world_size):
    """Outputs, gradients of inputs and parameters, and running statistics."""
    for rank, off in enumerate(trained(world_size)):
        beyond = {what: distance for what, distance in off[name].items() if distance > CASES[name].bound}
        assert not beyond, f"rank {rank} of {world_size}"
        assert len(off[name]) >= 4


@pytest.mark.slow
def test_torchs_own_data_parallel_takes_the_steps_of_the_whole_batch_with_it():
    for worst in run_ranks(under_ddp, 3):
        assert worst < 1e-10
