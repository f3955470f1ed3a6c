"""Sums of activations over real ranks."""

import torch
from tests.ranks import run_ranks

from lockstep.distributed.collectives import all_gather_flat
from lockstep.strategies.tensor.layers import Exchange


def sums(world):
    """The sum of different tensors of all ranks, by ``Exchange``, forward and backward."""
    import torch.distributed as dist

    exchange, found = Exchange(dist.group.WORLD), []
    for shape in [(1,), (7, 3), (4, 5, 6)]:
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
            total = exchange.sum(values)
            rows = torch.empty(world.world_size, values.numel(), dtype=dtype)
            all_gather_flat(rows.view(-1), values.view(-1), exchange.group)
            exact = rows.double().sum(0).view(shape)
            found.append((total.tolist(), bool(torch.allclose(total.double(), exact, rtol=1e-2, atol=1e-2))))
    x = torch.full((2,), 3.0, requires_grad=True)
    exchange.leave(exchange.enter(x) * (world.rank + 1)).sum().backward()
    return found, x.grad.tolist()


def test_sums_of_activations_have_the_same_bits_on_every_rank():
    everyone = run_ranks(sums, 4)
    assert all(each == everyone[0] for each in everyone)
    assert all(right for _, right in everyone[0][0])
    assert everyone[0][1] == [10.0, 10.0]
