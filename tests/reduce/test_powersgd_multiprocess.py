"""Reducers that round or compress, on real ranks: within the stated bounds, and equal on every rank."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.reduce.compressions import (
    bf16_steps,
    bytes_sent,
    powersgd_recovers,
    powersgd_steps,
    powersgd_uneven,
)
from tests.reduce.exchanges import reduce_steps


@pytest.mark.parametrize("kind", ["bf16", "powersgd"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_no_gradient_is_summed_in_the_tree_bit_for_bit(kind, world_size):
    leaves = [8, 1, 5, 8, 3]
    assert run_ranks(reduce_steps, world_size, kind, leaves, 8) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_bf16_is_within_its_bound_and_equal_on_every_rank(world_size):
    """With u = 2^-8, at most 2 u + u^2 of the sizes of the nodes: each is rounded once, and the sum once."""
    for wrong, rounded in run_ranks(bf16_steps, world_size):
        assert wrong == []
        assert rounded, "nothing was rounded, so nothing was tested"


@pytest.mark.parametrize("world_size", [2, 4])
def test_powersgd_gives_late_what_it_leaves_out(world_size):
    """Error feedback: all that came out and what is still left out make exactly all that went in."""
    for into, out, left_out, equal, exact_rest, compressed in run_ranks(powersgd_steps, world_size, 2):
        assert compressed == [(24, 12), (16, 16), (40, 20)]
        assert equal and exact_rest
        assert float(left_out.norm()) > 0.1 * float(into.norm()), "nothing was left out, so nothing was tested"
        assert float((out + left_out - into).abs().max()) < 1e-9 * float(into.abs().max())
        assert float((out - into).norm() / into.norm()) < 1.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_powersgd_finds_gradients_of_its_own_rank(world_size):
    """Two directions and two columns: nothing is left out, from the first step on."""
    for errors in run_ranks(powersgd_recovers, world_size):
        assert max(errors) < 1e-12


def test_powersgd_takes_steps_without_micro_batches_and_gradients_of_zero():
    for finite, norm in run_ranks(powersgd_uneven, 4):
        assert finite and norm > 0


@pytest.mark.shared_memory
def test_bytes_are_those_of_the_formula():
    """(64, 32) and (64,) of float32 on 4 ranks, each with one node of the tree.

    An exact sum sends every shard but the own one twice: as it is, and folded. bf16 halves that. PowerSGD with two
    columns does it for the vector (64), the left factor (64 x 2) and the right one (32 x 2).
    """
    numbers, twice = 64 * 32 + 64, 2 * 3 / 4
    expected = {
        ("ordered", False): numbers * 4 * twice,
        ("ordered", True): numbers * 4,
        ("ring", False): numbers * 4 * twice,
        ("bf16", False): numbers * 2 * twice,
        ("powersgd", False): (64 + 128 + 64) * 4 * twice,
        ("powersgd", True): (64 + 128 + 64) * 4,
    }
    found = run_ranks(all_bytes, 4, list(expected))
    assert found == [list(expected.values())] * 4


def all_bytes(world, ways):
    return [bytes_sent(world, kind, shared) for kind, shared in ways]


def test_a_vector_alone_is_never_compressed():
    from lockstep.reduce import BucketShape
    from lockstep.reduce.powersgd import _PowerSgdBucket

    bucket = _PowerSgdBucket(BucketShape(110, torch.float32, ((100,), (2, 5))), 1, 4, 0, torch.device("cpu"))
    assert bucket.rest == 110 and bucket.factors == (0, 0)
