"""Where the time of a step goes, from moments."""

import pytest

from lockstep.scale.measured import PhaseClock, exchange_and_waiting, mean_phases, slowest_rank, work


def test_every_second_of_a_step_is_in_exactly_one_phase():
    clock = PhaseClock(now=10.0)
    for mark, now in (
        ("compute", 11.0),
        ("forward", 11.5),
        ("backward", 13.5),
        ("forward", 16.5),
        ("backward", 17.0),
        ("reduce", 18.0),
        ("update", 22.0),
    ):
        clock.enter(mark, now)
    clock.end_step(22.25)
    assert clock.steps == [
        {"data": 1.0, "compute": 0.5, "forward": 2.5, "backward": 4.0, "exchange": 4.0, "optimizer": 0.25}
    ]
    assert sum(clock.steps[0].values()) == 22.25 - 10.0


def test_what_is_saved_between_steps_is_neither_data_nor_optimizer():
    clock = PhaseClock(now=0.0)
    clock.end_step(1.0)
    clock.enter("save", 1.5)
    clock.enter("data", 4.0)
    clock.enter("compute", 5.0)
    clock.end_step(5.0)
    assert clock.steps[1] == {"other": 3.0, "data": 1.0, "compute": 0.0}


def test_a_copy_is_taken_out_of_the_phase_it_happens_in():
    clock = PhaseClock(now=0.0)
    clock.enter("forward", 0.0)
    clock.copied(0.25)
    clock.enter("backward", 1.0)
    clock.end_step(1.0)
    assert clock.steps[0]["copy"] == 0.25
    assert clock.steps[0]["forward"] == 0.75


def test_the_mean_counts_steps_in_which_a_phase_did_not_occur():
    assert mean_phases([{"data": 1.0, "other": 3.0}, {"data": 2.0}, {"data": 3.0}]) == {
        "data": 2.0,
        "other": 1.0,
    }


RANKS = [
    {"forward": 2.0, "exchange": 3.0},
    {"forward": 4.5, "exchange": 0.5},
    {"forward": 4.0, "exchange": 1.0},
]


def test_the_slowest_rank_is_the_one_that_is_busiest_not_the_one_that_waits():
    assert slowest_rank(RANKS) == 1
    assert work(RANKS[0]) == 2.0
    assert slowest_rank([{"forward": 1.0}, {"forward": 1.0}]) == 0


def test_exchange_is_split_into_communication_and_waiting():
    communication, waiting = exchange_and_waiting(RANKS)
    assert communication == 0.5
    assert waiting == pytest.approx(1.0)
