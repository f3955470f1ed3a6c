"""Real ranks meet, are counted, and part."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def total(world, offset):
    value = torch.tensor([world.rank + offset])
    dist.all_reduce(value)
    return int(value)


def fail_on_two(world):
    if world.rank == 2:
        raise ValueError("rank two says no")
    dist.barrier()


def test_every_rank_takes_part_in_a_sum():
    assert run_ranks(total, 4, 10) == [46, 46, 46, 46]


def test_a_world_of_one_has_no_group():
    assert run_ranks(is_open, 1) == [False]


def is_open(world):
    return dist.is_initialized()


def test_a_failing_rank_is_raised_again_with_its_traceback():
    with pytest.raises(ValueError, match="rank two says no") as caught:
        run_ranks(fail_on_two, 3)
    assert "raised on rank 2 of 3" in caught.value.__notes__[0]
