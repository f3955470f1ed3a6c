"""The picture of the traffic moves data as it must: every rank ends with every sum, at the bytes that are said."""

from itertools import pairwise

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.explain.traffic import explain_traffic, ring_chunk, traffic_text
from lockstep.models.resnet import resnet34
from lockstep.reduce import BucketShape, NodeLayout
from lockstep.reduce.ordered import OrderedBucket


def ways(**numbers):
    return {way.name: way for way in explain_traffic(**numbers).ways}


def messages(way):
    return [message for moment in way.moments for message in moment.messages]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_after_a_ring_every_rank_has_every_sum_once(ranks):
    held = [{piece: [rank] for piece in range(ranks)} for rank in range(ranks)]
    for number in range(2 * (ranks - 1)):
        sent = [(rank, ring_chunk(number, rank, ranks)) for rank in range(ranks)]
        values = [list(held[rank][piece]) for rank, piece in sent]
        for (rank, piece), value in zip(sent, values):
            receiver = held[(rank + 1) % ranks]
            receiver[piece] = value + receiver[piece] if number < ranks - 1 else value
    orders = [held[0][piece] for piece in range(ranks)]
    assert all(rank == held[0] for rank in held)
    assert all(sorted(order) == list(range(ranks)) for order in orders)
    assert len(set(map(tuple, orders))) == ranks, "each piece is added in an order of its own"
    assert all((b - a) % ranks == 1 for order in orders for a, b in pairwise(order))


def test_the_messages_of_a_ring_are_those_of_its_rounds():
    way = ways(ranks=4)["ring"]
    assert [moment.title for moment in way.moments] == [
        f"{phase} {number}/3" for phase in ("reduce-scatter", "all-gather") for number in (1, 2, 3)
    ]
    for number, moment in enumerate(way.moments):
        assert [(m.sender, m.receiver, m.what) for m in moment.messages] == [
            (rank, (rank + 1) % 4, f"piece {ring_chunk(number, rank, 4)}") for rank in range(4)
        ]


@pytest.mark.parametrize("ranks, servers, k", [(1, 1, 8), (2, 2, 8), (3, 1, 8), (3, 2, 7), (4, 2, 8), (4, 1, 6)])
def test_the_bytes_are_the_sum_of_the_messages(ranks, servers, k):
    for way in ways(ranks=ranks, servers=servers, micro_batches=k, parameters=1200).values():
        for number in range(len(way.ends)):
            assert way.sent[number] == sum(m.bytes for m in messages(way) if m.sender == number), way.name
            assert way.received[number] == sum(m.bytes for m in messages(way) if m.receiver == number), way.name


@pytest.mark.parametrize("ranks, k, parameters", [(2, 8, 1000), (3, 8, 1001), (5, 13, 77), (6, 6, 5)])
def test_the_ordered_bytes_are_those_that_the_reducer_counts(ranks, k, parameters):
    holding = NodeLayout.of(k, ranks)
    bucket = OrderedBucket(BucketShape(parameters, torch.float32), ranks, holding.slots, torch.device("cpu"))
    counted = tuple(bucket.bytes_sent(len(nodes)) for nodes in holding.ranks)
    assert ways(ranks=ranks, micro_batches=k, parameters=parameters)["ordered"].sent == counted


def test_the_formulas_of_the_docs_hold():
    found = ways(ranks=4, servers=2, micro_batches=8, parameters=1 << 20)
    size = 4 << 20
    assert set(found["ring"].sent) == {2 * 3 * size // 4}
    assert set(found["ordered"].sent) == {(1 + 1) * 3 * size // 4}
    assert set(found["parameter_server"].sent[:4]) == {1 * size}
    assert set(found["parameter_server"].sent[4:]) == {(4 + 2 - 1) * size // 2}
    assert set(found["parameter_server"].received[4:]) == {(1 * 4 + 2 - 1) * size // 2}
    assert [found[name].level for name in found] == ["B", "A", "A"]


def test_the_default_is_the_model_that_it_names():
    with torch.device("meta"):
        model = resnet34()
    assert explain_traffic().parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_text_shows_each_message():
    lines = traffic_text(explain_traffic(ranks=3, servers=2)).splitlines()
    assert "  reduce-scatter 2/2  piece 2  piece 0  piece 1" in lines
    assert "      0 -> 1 2: the receiver's piece of 2 nodes" in lines
    assert "      w2 -> s0 s1: the server's keys of 1 node" in lines
    assert "ordered           A      174 MB (rank 0)    174 MB (rank 2)" in lines


def test_large_worlds_fit_the_terminal_and_say_what_is_left_out():
    text = traffic_text(explain_traffic(ranks=64, servers=5, parameters=10**9))
    assert max(map(len, text.splitlines())) <= 100
    assert "Left out: ranks 7 to 62 of 64; rounds 5 to 124 of 126." in text
    assert "Left out: workers 5 to 62 of 64; servers 1 to 3 of 5." in text


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({"servers": 0}, "--servers should be at least 1"),
        ({"parameters": -5}, "--parameters should be at least 1 and is -5"),
        ({"ranks": 9, "micro_batches": 8}, "cannot share micro_batches=8"),
        ({"ranks": 5000}, "Use at most 4096"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, said):
    with pytest.raises(ConfigError, match=said):
        explain_traffic(**numbers)


def test_sizes_that_read_alike_are_said_once():
    said = traffic_text(explain_traffic(ranks=8, servers=3, parameters=7 * 10**9))
    assert "push: 9.33 GB a message" in said and "9.33 GB to" not in said
