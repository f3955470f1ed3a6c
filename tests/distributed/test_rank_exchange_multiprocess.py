"""Exchanges of bytes between real ranks, through shared memory and by collectives."""

import pytest
import torch
from tests.ranks import run_ranks

from lockstep.distributed import rank_exchange
from lockstep.distributed.rank_exchange import GroupExchange, SharedMemoryExchange, open_exchange
from lockstep.errors import RankError, StallError

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize(
    "shared",
    [pytest.param(True, marks=pytest.mark.shared_memory), False],
    ids=["shared_memory", "collectives"],
)
LENGTHS = (0, 1, 7, 64, 1000)
"""Of rows; the longest need several pieces of ``PIECE`` bytes."""
PIECE = 480


def opened(shared, timeout=30.0):
    import torch.distributed as dist

    rank_exchange._PIECE_BYTES = PIECE
    exchange = open_exchange(dist.group.WORLD, CPU, timeout, shared)
    assert type(exchange) is (SharedMemoryExchange if shared else GroupExchange)
    return exchange


def row_of(rank, length, dtype):
    return (torch.arange(length) * 7 + rank * 31).remainder(100).to(dtype)


def exchanges(world, shared):
    """Exchanges rows that all ranks can compute; True for each exchange that is right."""
    exchange, right = opened(shared), []
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool):
            for length in LENGTHS:
                row = row_of(world.rank, length, dtype)
                wanted = torch.stack([row_of(rank, length, dtype) for rank in range(world.world_size)])
                right.append(torch.equal(exchange.all_gather(row), wanted))
                given = torch.stack([row_of(world.rank * 10 + to, length, dtype) for to in range(world.world_size)])
                wanted = torch.stack(
                    [row_of(rank * 10 + world.rank, length, dtype) for rank in range(world.world_size)]
                )
                right.append(torch.equal(exchange.all_to_all(given.clone()), wanted))
    every_other = exchange.all_gather(torch.arange(10)[::2])
    exchange.release()
    return all(right), every_other[0].tolist(), (exchange.ranks, exchange.rank)


@KINDS
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_gets_what_the_others_gave_it(world_size, shared):
    results = run_ranks(exchanges, world_size, shared)
    assert results == [(True, [0, 2, 4, 6, 8], (world_size, rank)) for rank in range(world_size)]


def parts_of(rank, to, counts):
    return [row_of(rank * 10 + to, length, torch.float32) + place for place, length in enumerate(counts)]


def exchanges_parts(world, shared):
    """The same of parts whose lengths differ from rank to rank, some of them empty; one rank only gives in the end."""
    exchange, right, ranks = opened(shared), [], range(world.world_size)
    for lengths in ([3, 0], [130, 7], [0, 400]):
        counts = [[length + rank if length else 0 for length in lengths] for rank in ranks]
        wanted = [torch.cat(parts_of(rank, 0, counts[rank])) for rank in ranks]
        places = [[torch.zeros(length) for length in counts[rank]] for rank in ranks]
        exchange.gather_parts(parts_of(world.rank, 0, counts[world.rank]), places, counts)
        right += [torch.equal(torch.cat(row), each) for row, each in zip(places, wanted)]
        given = [parts_of(world.rank, to, counts[to]) for to in ranks]
        found = exchange.exchange_parts(given, counts)
        wanted = [torch.cat(parts_of(rank, world.rank, counts[world.rank])) for rank in ranks]
        right.append(torch.equal(found, torch.stack(wanted)))
        exchange.gather_parts(parts_of(world.rank, 0, counts[world.rank]), places if world.rank else [], counts)
    exchange.release()
    return all(right)


@KINDS
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_parts_of_any_lengths(world_size, shared):
    assert run_ranks(exchanges_parts, world_size, shared) == [True] * world_size


def begun_anew(world):
    exchange = opened(True)
    exchange._count = 2**32 - 3
    exchange._written[world.rank]._word.value = 2**32 - 3
    torch.distributed.barrier()  # every rank has set its own
    found = [exchange.all_gather(torch.tensor([number * 10 + world.rank])).flatten().tolist() for number in range(6)]
    return found, exchange._written[world.rank].value


@pytest.mark.shared_memory
def test_counters_begin_anew_at_the_end_of_their_numbers():
    wanted = [[number * 10, number * 10 + 1] for number in range(6)]
    assert run_ranks(begun_anew, 2) == [(wanted, 3)] * 2


def unlike(world):
    exchange = opened(True)
    found = []
    for mine in (torch.zeros(4 + world.rank), torch.zeros(4)):
        try:
            exchange.all_gather(mine)
        except RankError as error:
            found.append(str(error))
    return found


@pytest.mark.shared_memory
def test_ranks_that_exchange_different_amounts_are_told_so():
    first, second = run_ranks(unlike, 2)
    assert first == second
    assert len(first) == 1
    assert "different amounts of data (bytes by rank: [16, 20])" in first[0]


def unlike_kinds(world):
    exchange = opened(True)
    call = exchange.all_gather if world.rank else exchange.all_to_all
    try:
        call(torch.zeros(8) if world.rank else torch.zeros(2, 4))
    except RankError:
        return True


@pytest.mark.shared_memory
def test_ranks_that_are_in_different_calls_are_told_so():
    assert run_ranks(unlike_kinds, 2) == [True, True]


def alone(world):
    exchange = opened(True, timeout=0.2)
    if world.rank == 2:
        return ""
    try:
        exchange.all_gather(torch.zeros(1))
    except StallError as error:
        return str(error)


@pytest.mark.shared_memory
def test_a_missing_rank_is_named_after_the_timeout():
    first, second, _ = run_ranks(alone, 3)
    assert "Rank 0 timed out" in first
    assert "waiting for what rank 2 holds. Missing ranks: [2]" in first
    assert "Rank 1 timed out" in second
