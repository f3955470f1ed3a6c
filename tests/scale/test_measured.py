"""The parts of a step's time, from the moments at which phases begin."""

import json

import pytest

from lockstep.scale.measured import (
    PhaseClock,
    Round,
    Spread,
    exchange_and_waiting,
    mean_phases,
    row,
    slowest_rank,
    work,
)


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


def test_a_round_is_read_from_the_files_of_its_ranks(tmp_path):
    for rank, seconds in enumerate((2.5, 4.0)):
        steps = [{"forward": 1.0 + rank}, {"forward": 2.0 + rank, "data": 0.5}]
        record = {
            "seconds": seconds,
            "samples": 28,
            "steps": steps,
            "steps_per_epoch": 7,
            "samples_per_epoch": 98,
            "parameter_bytes": 40,
        }
        record |= {"micro_batches": 8, "micro_batch_size": 2}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(record))
    assert Round.read(tmp_path, 2) == Round(
        seconds_per_step=2.0,  # of the slower rank
        samples_per_step=14.0,
        ranks=({"forward": 1.5, "data": 0.25}, {"forward": 2.5, "data": 0.25}),
        steps_per_epoch=7,
        samples_per_epoch=98,
        parameter_bytes=40,
        micro_batches=8,
        micro_batch_size=2,
    )


def test_a_row_sums_up_its_rounds_beside_those_of_one_device():
    def a_round(seconds, *ranks):
        return Round(seconds, 16.0, ranks, 5, 80, 40, 8, 2)

    two = [a_round(0.5, *RANKS[:2]), a_round(1.0, *RANKS[:2]), a_round(0.8, *RANKS[:2])]
    found = row("ddp on 2", "ddp", 2, two, [a_round(each, {"forward": 4.0}) for each in (1.0, 1.0, 2.0)])
    assert found.step == Spread(0.8, 0.5, 1.0)
    assert found.epoch == Spread(4.0, 2.5, 5.0)
    assert found.samples_per_second == Spread(20.0, 16.0, 32.0)
    assert found.speed_up == Spread(2.0, 1.0, 2.5)  # of each round over the same one of one device
    assert found.efficiency == Spread(1.0, 0.5, 1.25)
    assert found.phases == {"forward": 3.25, "exchange": 1.75}
    assert (found.communication, found.waiting) == (0.5, 1.25)
    assert (found.slowest, found.computing) == (1, 2)
