from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data.loader import Planner, planned_steps
from lockstep.errors import ConfigError


@given(
    samples=st.integers(1, 20_000),
    size=st.integers(1, 40),
    micro_batches=st.sampled_from([1, 2, 3, 8]),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    smallest=st.sampled_from([1, 2]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_steps_computed_together_are_the_steps_of_the_plan(
    samples, size, micro_batches, epoch, shuffle, drop_last, smallest, data
):
    shape = BatchShape(global_batch=size * micro_batches, micro_batches=micro_batches)
    options = {"shuffle": shuffle, "drop_last": drop_last, "smallest_micro_batch": smallest}
    try:
        plan = SamplePlan(samples=samples, shape=shape, seed=7, **options)
    except ConfigError:
        return
    first = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    steps = list(planned_steps(plan, epoch, first))
    assert [step.position for step in steps] == list(range(first, plan.steps_per_epoch))
    checked = {0, len(steps) // 2, len(steps) - 1}
    for number in checked:
        wanted = plan.step(epoch, first + number)
        assert (steps[number].step, steps[number].epoch) == (wanted.step, wanted.epoch)
        assert steps[number].leaves == wanted.leaves
        assert all(np.array_equal(a, b) for a, b in zip(steps[number].indices, wanted.indices))


def test_steps_across_the_border_of_two_blocks_are_the_plans():
    plan = SamplePlan(samples=30_001, shape=BatchShape(global_batch=96, micro_batches=6), seed=3)
    for step in planned_steps(plan, 2):
        wanted = plan.step(2, step.position)
        assert all(np.array_equal(a, b) for a, b in zip(step.indices, wanted.indices, strict=True))


def test_a_first_step_behind_the_end_gives_nothing():
    plan = SamplePlan(samples=64, shape=BatchShape(global_batch=32, micro_batches=4))
    assert list(planned_steps(plan, 0, 2)) == []
    with pytest.raises(ConfigError, match="The data set has 0 samples"):
        replace(plan, samples=0)


@pytest.mark.parametrize("samples", [8, 900, 4096, 4097, 9000])
def test_epochs_planned_with_others_are_the_plans_in_whatever_order_they_are_asked_for(samples):
    plan = SamplePlan(samples=samples, shape=BatchShape(global_batch=8, micro_batches=2), seed=3)
    planner, last = Planner(plan), plan.steps_per_epoch - 1
    for epoch, first in ((0, 0), (1, last), (9, last // 2), (2, 0), (10, last), (0, last)):
        steps = list(planner.steps(epoch, first))
        assert [step.position for step in steps] == list(range(first, plan.steps_per_epoch))
        for step in (steps[0], steps[-1]):
            wanted = plan.step(epoch, step.position)
            assert (step.epoch, step.step) == (wanted.epoch, wanted.step)
            assert all(np.array_equal(a, b) for a, b in zip(step.indices, wanted.indices, strict=True))
