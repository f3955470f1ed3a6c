"""Sums of activations over real ranks, each of which holds some of the shards."""

import pytest
import torch
from tests.ranks import run_ranks

from lockstep.distributed.rank_exchange import open_exchange
from lockstep.strategies.tensor.layers import Exchange

SHARDS = 12


def sums(world, shared):
    """The sum of twelve different tensors, by ``Exchange``, forward and backward."""
    import torch.distributed as dist

    between = open_exchange(dist.group.WORLD, torch.device("cpu"), 60.0, shared) if world.world_size > 1 else None
    exchange, found = Exchange(between, SHARDS), []
    held = range(exchange.first, exchange.first + exchange.held)
    for shape in [(1,), (7, 3), (4, 5, 6)]:
        for dtype in (torch.float32, torch.bfloat16):
            values = [torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(SHARDS)]
            total = exchange.sum([values[n] for n in held])
            exact = torch.stack(values).double().sum(0)
            found.append((total.tolist(), bool(torch.allclose(total.double(), exact, rtol=1e-2, atol=5e-2))))
    x = torch.full((2,), 3.0, requires_grad=True)
    exchange.leave([each * (n + 1) for each, n in zip(exchange.enter(x), held)]).sum().backward()
    return found, x.grad.tolist()


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "collectives"])
@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_sums_have_the_same_bits_on_every_rank_of_every_number(world_size, shared):
    """On 4 ranks each holds three shards, which are two nodes of the tree."""
    (alone,) = run_ranks(sums, 1, shared)
    assert run_ranks(sums, world_size, shared) == [alone] * world_size
    assert all(right for _, right in alone[0])
    assert alone[1] == [78.0, 78.0]
