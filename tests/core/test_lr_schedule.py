"""The learning rate as a pure function of the optimizer step."""

import math

import pytest

from lockstep.core.lr_schedule import SCHEDULES, Schedule


def test_cosine_falls_from_one_to_the_final_factor_like_half_a_cosine():
    schedule = Schedule(kind="cosine", steps=100, final_factor=0.1)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(50) == pytest.approx(0.55)
    assert schedule.factor(25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule.factor(100) == pytest.approx(0.1)


def test_linear_falls_in_a_straight_line():
    schedule = Schedule(kind="linear", steps=10, final_factor=0.5)
    assert [schedule.factor(step) for step in (0, 2, 10)] == pytest.approx([1.0, 0.9, 0.5])


def test_step_drops_at_once_and_keeps_dropping():
    schedule = Schedule(kind="step", steps=30, step_every=10, step_factor=0.1)
    assert [schedule.factor(step) for step in (0, 9, 10, 19, 20)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warm_up_rises_evenly_to_one_and_the_shape_begins_after_it(kind):
    schedule = Schedule(kind=kind, steps=50, warmup_steps=5, step_every=45)
    assert [schedule.factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule.factor(5) == 1.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_what_follows_a_warm_up_is_halfway_down_in_its_middle_and_ends_at_the_final_factor(kind):
    schedule = Schedule(kind=kind, steps=50, warmup_steps=10, final_factor=0.2)
    assert [schedule.factor(step) for step in (9, 10, 30, 50, 70)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_factors_stay_between_zero_and_one_and_never_rise_after_the_warm_up(kind):
    schedule = Schedule(kind=kind, steps=97, warmup_steps=7, final_factor=0.03, step_every=13)
    factors = [schedule.factor(step) for step in range(7, 120)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == schedule.factor(97)


def test_a_run_of_one_step_trains_at_the_full_rate():
    assert Schedule(kind="cosine", steps=1).factor(0) == 1.0
