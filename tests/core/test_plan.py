"""The samples of a step: every one once, whoever asks and in whatever order."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.core.plan import BatchShape, SamplePlan, Share, share
from lockstep.errors import ConfigError

SHAPES = st.builds(
    lambda size, k: BatchShape(global_batch=size * k, micro_batches=k), st.integers(1, 9), st.integers(1, 12)
)


def plan_of(samples, global_batch=8, micro_batches=4, **options):
    shape = BatchShape(global_batch=global_batch, micro_batches=micro_batches)
    return SamplePlan(samples=samples, shape=shape, **options)


def epoch_of(plan, epoch=0):
    return [plan.step(epoch, position) for position in range(plan.steps_per_epoch)]


def all_samples(steps):
    return [int(index) for step in steps for part in step.indices for index in part]


def sizes(step):
    return [len(part) for part in step.indices]


def test_the_picture_in_the_module_s_description():
    first, last = epoch_of(plan_of(11))
    assert (sizes(first), sizes(last)) == ([2, 2, 2, 2], [2, 1])
    assert (first.leaves, last.leaves, first.samples, last.samples) == (4, 2, 8, 3)
    assert [len(last.numbers(k)) for k in range(4)] == [2, 1, 0, 0]


def test_without_shuffling_samples_come_in_order():
    steps = epoch_of(plan_of(11, shuffle=False))
    assert [[part.tolist() for part in step.indices] for step in steps] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10]],
    ]


def test_a_share_is_floor_or_ceil_and_the_larger_come_first():
    assert [list(share(8, 3, holder)) for holder in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(share(2, 5, holder)) for holder in range(5)] == [1, 1, 0, 0, 0]


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 20))
@pytest.mark.fault("C8")
def test_shares_are_consecutive_and_even(items, holders):
    parts = [share(items, holders, holder) for holder in range(holders)]
    assert [item for part in parts for item in part] == list(range(items))
    lengths = [len(part) for part in parts]
    assert set(lengths) <= {items // holders, -(-items // holders)}
    assert lengths == sorted(lengths, reverse=True)


@settings(deadline=None)
@given(st.integers(1, 120), SHAPES, st.integers(0, 5), st.integers(0, 3), st.booleans())
@pytest.mark.fault("C8")
def test_every_sample_is_read_exactly_once(samples, shape, seed, epoch, shuffle):
    plan = SamplePlan(samples=samples, shape=shape, seed=seed, shuffle=shuffle)
    assert sorted(all_samples(epoch_of(plan, epoch))) == list(range(samples))
    assert plan.dropped_samples == 0


@settings(deadline=None)
@given(st.integers(1, 120), SHAPES, st.booleans(), st.integers(1, 3))
def test_micro_batches_are_full_then_one_short_one_then_none(samples, shape, drop_last, smallest):
    assume(not drop_last or samples >= shape.global_batch)
    assume(samples % shape.micro_batch_size >= smallest or samples >= shape.micro_batch_size)
    plan = SamplePlan(samples=samples, shape=shape, drop_last=drop_last, smallest_micro_batch=smallest)
    steps = epoch_of(plan)
    seen = all_samples(steps)
    assert len(seen) == len(set(seen)) == samples - plan.dropped_samples
    for step in steps[:-1]:
        assert sizes(step) == [shape.micro_batch_size] * shape.micro_batches
    *full, last = sizes(steps[-1])
    assert set(full) <= {shape.micro_batch_size}
    assert 1 <= last <= shape.micro_batch_size
    assert steps[-1].leaves <= shape.micro_batches
    assert last == shape.micro_batch_size or last >= smallest
    if drop_last:
        assert sizes(steps[-1]) == [shape.micro_batch_size] * shape.micro_batches


def test_dropping_the_last_batch_drops_it_whole():
    plan = plan_of(23, drop_last=True)
    assert (plan.steps_per_epoch, plan.dropped_samples) == (2, 7)
    assert len(set(all_samples(epoch_of(plan)))) == 16


def test_dropping_the_last_batch_drops_nothing_when_all_are_full():
    plan = plan_of(24, drop_last=True)
    assert (plan.steps_per_epoch, plan.dropped_samples) == (3, 0)


def test_a_tail_of_one_row_is_left_out_where_two_are_needed():
    plan = plan_of(25, 12, 4, smallest_micro_batch=2)
    assert (plan.steps_per_epoch, plan.dropped_samples) == (2, 1)
    assert [sizes(step) for step in epoch_of(plan)] == [[3] * 4, [3] * 4]
    whole = plan_of(26, 12, 4, smallest_micro_batch=2)
    assert [sizes(step) for step in epoch_of(whole)] == [[3] * 4, [3] * 4, [2]]


def test_the_sample_that_is_left_out_is_another_one_each_epoch():
    plan = plan_of(25, 12, 4, smallest_micro_batch=2)
    left_out = {(set(range(25)) - set(all_samples(epoch_of(plan, epoch)))).pop() for epoch in range(12)}
    assert len(left_out) > 3


def test_micro_batches_of_one_row_are_no_tail():
    plan = plan_of(10, 4, 4, smallest_micro_batch=2)
    assert plan.dropped_samples == 0
    assert [sizes(step) for step in epoch_of(plan)] == [[1] * 4, [1] * 4, [1] * 2]


def test_steps_are_numbered_over_epochs():
    plan = plan_of(20)
    assert [step.step for epoch in range(2) for step in epoch_of(plan, epoch)] == list(range(6))
    assert [(step.epoch, step.position) for step in epoch_of(plan, 1)] == [(1, 0), (1, 1), (1, 2)]


def test_a_step_can_be_planned_without_the_ones_before_it():
    plan, again = plan_of(100), plan_of(100)
    expected = [[part.tolist() for part in step.indices] for step in epoch_of(plan, 3)]
    for position in reversed(range(again.steps_per_epoch)):
        assert [part.tolist() for part in again.step(3, position).indices] == expected[position]


def test_steps_planned_together_are_those_planned_one_by_one():
    plan = SamplePlan(samples=53, shape=BatchShape(global_batch=8, micro_batches=4), seed=3)
    together, alone = plan.steps(2, 3, plan.steps_per_epoch), [plan.step(2, n) for n in range(3, 7)]
    assert [(each.step, each.position, each.packed) for each in together] == [
        (each.step, each.position, each.packed) for each in alone
    ]
    for one, other in zip(together, alone, strict=True):
        assert [part.tolist() for part in one.indices] == [part.tolist() for part in other.indices]
        assert one.packed == np.concatenate(one.indices).tobytes()


def test_epochs_and_seeds_have_unrelated_orders():
    orders = [all_samples(epoch_of(plan_of(64, seed=seed), epoch)) for seed in range(3) for epoch in range(3)]
    for one in range(len(orders)):
        for other in range(one):
            assert np.mean(np.array(orders[one]) == np.array(orders[other])) < 0.2


def test_indices_can_index():
    step = plan_of(11).step(0, 0)
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in step.indices)


@pytest.mark.parametrize("position", [-1, 3])
def test_a_step_beyond_the_epoch_does_not_exist(position):
    with pytest.raises(IndexError, match=f"epoch 2 has steps 0 to 2, not {position}"):
        plan_of(20).step(2, position)


def test_a_batch_that_cannot_be_cut_is_refused_with_a_size_that_can():
    with pytest.raises(ConfigError, match=r"micro_batches=8 of equal size.*global_batch=96"):
        BatchShape(global_batch=100, micro_batches=8)
    with pytest.raises(ConfigError, match="for example global_batch=8"):
        BatchShape(global_batch=3, micro_batches=8)
    with pytest.raises(ConfigError, match="must both be at least 1"):
        BatchShape(global_batch=0, micro_batches=1)


def test_more_ranks_than_micro_batches_are_refused():
    shape = BatchShape(global_batch=16, micro_batches=8)
    shape.check_holders(8)
    with pytest.raises(ConfigError, match=r"9 data-parallel ranks cannot share micro_batches=8"):
        shape.check_holders(9)


@pytest.mark.parametrize(
    ("samples", "options"),
    [(0, {}), (7, {"drop_last": True}), (1, {"smallest_micro_batch": 2})],
)
@pytest.mark.fault("M13")
def test_too_little_data_for_one_step_is_refused(samples, options):
    with pytest.raises(ConfigError, match=f"has {samples} samples, too few for one step"):
        plan_of(samples, **options)


def test_a_plan_over_a_billion_samples_is_as_quick_as_over_ten():
    step = plan_of(10**9, 256, 8).step(5, 1234)
    seen = np.concatenate(step.indices)
    assert len(np.unique(seen)) == 256
    assert seen.min() >= 0 and seen.max() < 10**9


@pytest.mark.parametrize("items", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("holders", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_shares_hold_every_item_once(items, holders, interleaved):
    share = Share(holders=holders, interleaved=interleaved)
    held = [list(share.of(items, holder)) for holder in range(holders)]
    assert sorted(k for each in held for k in each) == list(range(items))
    assert max(map(len, held)) == share.longest(items)


@pytest.mark.parametrize("items", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("holders", [1, 2, 3, 5])
def test_shares_in_rounds_are_equally_long_and_their_surplus_are_spares(items, holders):
    share = Share(holders=holders, rounds=True)
    held = [list(share.of(items, holder)) for holder in range(holders)]
    assert {len(each) for each in held} == {share.longest(items)}
    assert sorted(k for each in held for k in each if k < items) == list(range(items))
    for round_number, together in enumerate(zip(*held)):
        assert together == tuple(range(round_number * holders, (round_number + 1) * holders))


@pytest.mark.parametrize("items", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("holders", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", [{}, {"spare": True}, {"interleaved": True}, {"rounds": True}])
def test_what_the_holders_have_is_put_into_the_order_of_the_items(items, holders, kind):
    share = Share(holders=holders, **kind)
    rows = torch.full((holders, share.longest(items) + 1, 2), -1)  # more rows than in this ragged step
    for holder in range(holders):
        for row, k in zip(rows[holder], share.of(items, holder)):
            row[:] = k
    assert share.in_order(rows, items).tolist() == [[k, k] for k in range(items)]


@pytest.mark.parametrize("holders", [1, 2, 3, 5])
def test_a_spare_is_given_to_a_process_without_an_item_and_to_no_other(holders):
    share, plain = Share(holders=holders, spare=True), Share(holders=holders)
    for holder in range(holders):
        assert list(share.of(2, holder)) == (list(plain.of(2, holder)) or [2])


def test_a_process_that_computes_nothing_takes_nothing():
    assert list(Share(holders=2, holder=None).of(8)) == []
