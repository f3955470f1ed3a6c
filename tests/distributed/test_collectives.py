"""Small exchanges between real ranks."""

import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from lockstep.distributed.collectives import all_gather_flat, broadcast_tensors, gather_json

CPU = torch.device("cpu")
LENGTHS = 246, 247, 100_000
"""The JSON of the first, with its quotation marks, is the longest that one exchange carries."""


def exchange(world):
    group = dist.group.WORLD
    values = [None, {"ü": [1, 2.5, "x" * world.rank]}, "", [], world.rank, world.rank or None]
    everyone = [gather_json(value, group, CPU) for value in values]
    long = [gather_json("y" * (length if world.rank == 1 else 0), group, CPU) for length in LENGTHS]
    parts = torch.zeros(2 * world.world_size)
    work = all_gather_flat(parts, torch.full((2,), float(world.rank)), group, async_op=True)
    work.wait()
    return everyone, [[len(text) for text in texts] for texts in long], parts.tolist()


def test_every_rank_gets_every_rank_s_value():
    for everyone, lengths, parts in run_ranks(exchange, 3):
        expected = [{"ü": [1, 2.5, "x" * rank]} for rank in range(3)]
        assert everyone == [[None] * 3, expected, [""] * 3, [[]] * 3, [0, 1, 2], [None, 1, 2]]
        assert lengths == [[0, length, 0] for length in LENGTHS]
        assert parts == [0, 0, 1, 1, 2, 2]


def spread(world):
    torch.manual_seed(world.rank)
    layouts = [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 4).t(),
        torch.randn(6)[::2],
        torch.nn.Parameter(torch.randn(3)),
        torch.tensor(world.rank),
        torch.randn(0, 3),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(4) > 0,
    ]
    strides = [tensor.stride() for tensor in layouts]
    broadcast_tensors(layouts, 1, dist.group.WORLD)
    assert [tensor.stride() for tensor in layouts] == strides
    return [tensor.detach().clone() for tensor in layouts]


def test_a_broadcast_reaches_every_layout_and_type():
    results = run_ranks(spread, 3)
    for result in results:
        assert all(torch.equal(one, other) for one, other in zip(result, results[1], strict=True))
    assert int(results[0][4]) == 1
