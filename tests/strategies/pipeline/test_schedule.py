"""The orders of a pipeline: those of torch, without deadlock for any number of micro-batches, and theory's bubble."""

from types import SimpleNamespace

import pytest

from lockstep.strategies.pipeline.schedule import (
    SCHEDULES,
    Action,
    bubble,
    needs,
    order_of,
    timeline,
    waiting,
)

SHAPES = [(ranks, stages) for ranks in (2, 3, 4, 5) for stages in (1, 2, 3)]


def orders(schedule, ranks, stages_per_rank, count):
    per_rank = stages_per_rank if schedule == "interleaved" else 1
    return [order_of(schedule, rank, ranks, per_rank, count) for rank in range(ranks)]


def written(order):
    return " ".join(map(str, order))


def torch_order(schedule, rank, ranks, stages_per_rank, count):
    """The actions of torch's schedule for a rank, without building stages."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B  # takes 1 s

    if schedule == "interleaved":
        rounds = max(1, count // ranks)
        told = SimpleNamespace(
            n_local_stages=stages_per_rank,
            microbatches_per_round=count // rounds,
            pp_group_size=ranks,
            _n_microbatches=count,
        )
        found = ScheduleInterleaved1F1B._calculate_single_rank_operations(told, rank)
    else:
        kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        found = kind._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=count))[rank]
    return " ".join(str(action) for action in found if action and "REDUCE" not in str(action))


def test_the_pictures_of_the_docs():
    assert written(order_of("gpipe", 1, 2, 1, 4)) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert written(order_of("1f1b", 0, 2, 1, 4)) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert written(order_of("1f1b", 1, 2, 1, 4)) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    interleaved = "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert written(order_of("interleaved", 0, 2, 2, 4)) == interleaved


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks, stages", SHAPES)
def test_the_orders_are_those_of_torch(schedule, ranks, stages):
    """Of 1F1B but for the last rank, where torch's list, made for drawing only, begins with micro-batch 1."""
    stages = stages if schedule == "interleaved" else 1
    for count in (ranks, 2 * ranks, 3 * ranks):
        for rank in range(ranks - (schedule == "1f1b")):
            expected = torch_order(schedule, rank, ranks, stages, count)
            assert written(order_of(schedule, rank, ranks, stages, count)) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks, stages", SHAPES)
def test_any_number_of_micro_batches_goes_through_every_stage_once_and_in_order(schedule, ranks, stages):
    stages = stages if schedule == "interleaved" else 1
    for count in range(14):
        all_orders = orders(schedule, ranks, stages, count)
        timeline(all_orders)  # raises where ranks wait for one another
        for rank, order in enumerate(all_orders):
            for stage in range(rank, ranks * stages, ranks):
                for forward in (True, False):
                    places = [a.place for a in order if a.stage == stage and a.forward == forward]
                    assert places == list(range(count))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks, stages", SHAPES)
def test_the_bubble_is_that_of_theory(schedule, ranks, stages):
    stages = stages if schedule == "interleaved" else 1
    for count in (ranks, 2 * ranks, 4 * ranks):
        spans = timeline(orders(schedule, ranks, stages, count))
        assert waiting(spans) == pytest.approx(bubble(ranks, stages, count))


def test_1f1b_keeps_at_most_as_many_activations_as_there_are_ranks():
    for ranks in (2, 4):
        for rank, order in enumerate(orders("1f1b", ranks, 1, 12)):
            kept = most = 0
            for action in order:
                kept += 1 if action.forward else -1
                most = max(most, kept)
            assert most == ranks - rank


def test_what_is_sent_over_one_channel_is_received_in_the_same_order():
    """Channels put no name on what they carry; both directions and the ways around have channels of their own."""
    for schedule in SCHEDULES:
        for ranks, stages in SHAPES:
            stages = stages if schedule == "interleaved" else 1
            for count in range(1, 9):
                all_orders, last = orders(schedule, ranks, stages, count), ranks * stages - 1
                for rank, order in enumerate(all_orders):
                    for forward in (True, False):
                        for around in (True, False):
                            got = received(order, last, forward, around, rank, ranks)
                            peer = all_orders[(rank + (-1 if forward else 1)) % ranks]
                            assert got == [action for action in peer if action in set(got)]


def received(order, last, forward, around, rank, ranks):
    """The micro-batches that a rank takes from its neighbour, in order."""
    border = rank == 0 if forward else rank == ranks - 1
    if around != border:
        return []
    from_others = [need for a in order if a.forward == forward for need in needs(a, last)]
    return [need for need in from_others if need.stage % ranks != rank]


def test_orders_that_wait_for_one_another_are_found():
    forward, back = Action(0, 0, True), Action(0, 0, False)
    with pytest.raises(ValueError, match="wait for one another"):
        timeline([(back, forward), (Action(1, 0, True), Action(1, 0, False))])
