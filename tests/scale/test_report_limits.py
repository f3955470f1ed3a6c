"""Speed-up, efficiency, and the sentence that says what limits them."""

import dataclasses

import pytest

from lockstep.scale.measured import Round, row
from lockstep.scale.report import Resources, lost_seconds, sentence

MACHINE = Resources(cores=8, threads=1, workers=1, micro_batches=8)
ALONE = {"data": 0.004, "forward": 0.4, "backward": 0.4, "exchange": 0.002, "optimizer": 0.01}


def a_round(*ranks, samples=128.0):
    seconds = max(sum(rank.values()) for rank in ranks)
    return Round(seconds, samples, ranks, 10, 1280, 4000, 8, 16)


def a_row(devices, *ranks):
    """A layout of which every rank spends what it is told, beside a fair part of computing."""
    base = {
        "data": 0.002,
        "forward": 0.4 / devices,
        "backward": 0.4 / devices,
        "exchange": 0.001,
        "optimizer": 0.01,
    }
    each = [base | {name: base.get(name, 0.0) + more for name, more in rank.items()} for rank in ranks]
    return row(f"ddp on {devices}", "ddp", devices, [a_round(*each)], [a_round(ALONE)])


ONE = row("single on 1", "single", 1, [a_round(ALONE)], [a_round(ALONE)])


def test_speed_up_and_efficiency_are_taken_within_a_round():
    fast, slow = {"forward": 1.0}, {"forward": 2.0}
    alone = [a_round(fast), a_round(slow)]
    two = [a_round({"forward": 0.5}, {"forward": 0.625}), a_round({"forward": 1.0}, {"forward": 1.25})]
    found = row("ddp on 2", "ddp", 2, two, alone)
    assert (found.speed_up.low, found.speed_up.median, found.speed_up.high) == pytest.approx((1.6, 1.6, 1.6))
    assert found.efficiency.median == pytest.approx(0.8)
    assert found.epoch.low == pytest.approx(6.25)
    assert found.epoch.high == pytest.approx(12.5)
    assert found.slowest == 1
    assert found.samples_per_second.high == pytest.approx(128 / 0.625)


def test_the_seconds_lost_are_those_that_were_added():
    lost = lost_seconds(ONE, a_row(2, {"data": 0.5}, {"data": 0.5}), MACHINE)
    assert lost["data"] == pytest.approx(0.5)
    assert lost["micro-batches"] == pytest.approx(0.0)
    assert lost["computing"] == pytest.approx(0.0)
    assert lost["optimizer"] == pytest.approx(0.005)
    assert all(seconds >= 0 for seconds in lost.values())


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{"data": 0.3}] * 2, "waiting for data (3e+02 ms"),
        ([{"exchange": 0.3}] * 2, "communication that is not hidden by computing"),
        ([{"optimizer": 0.3}] * 2, "the optimizer, which every device runs"),
        ([{"exchange": 0.6}, {"forward": 0.6}], "rank 1, for which the others wait"),
        ([{"backward": 0.3}] * 2, "computing itself"),
        ([{"other": 0.3, "data": 0.1}] * 2, "what is done between steps (3e+02 ms"),
    ],
)
def test_the_sentence_names_the_greatest_cause(ranks, said):
    assert said in sentence(ONE, a_row(2, *ranks), MACHINE)


def test_too_few_cores_are_said_before_all_that_follows_from_them():
    few = dataclasses.replace(MACHINE, cores=4, threads=2)
    said = sentence(ONE, a_row(4, *[{"exchange": 5.0}] * 4), few)
    assert "too few cores, since 4 devices with 2 threads each need 8 and there are 4" in said
    assert "at most 2 devices" in said


def test_loader_workers_that_take_the_cores_are_named():
    few = dataclasses.replace(MACHINE, cores=4, workers=3)
    assert "Lower data.workers" in sentence(ONE, a_row(2, *[{"backward": 0.3}] * 2), few)


def test_micro_batches_that_devices_do_not_divide_are_named():
    """Of 8 micro-batches on 3 devices two compute 3 and one 2, so 3/8 of the time is the least instead of 1/3."""
    three = dict.fromkeys(("forward", "backward"), 0.4 * (3 / 8 - 1 / 3))
    two = dict.fromkeys(("forward", "backward"), 0.4 * (2 / 8 - 1 / 3)) | {"exchange": 0.1}
    said = sentence(ONE, a_row(3, three, three, two), MACHINE)
    assert "3 devices do not divide micro_batches = 8: some compute 3" in said
    assert "micro_batches = 9" in said


def with_server(*workers, **server):
    """Two workers, each with half of the computing, and a parameter server that waits for them."""
    half = {"data": 0.002, "forward": 0.2, "backward": 0.2, "exchange": 0.05, "optimizer": 0.01}
    ranks = [half | worker for worker in workers or ({}, {})]
    return row("parameter_server on 3", "parameter_server", 3, [a_round(*ranks, server)], [a_round(ALONE)])


def test_a_parameter_server_is_not_named_for_waiting_or_for_its_update():
    """It was: all that it does was taken for work that the others wait for."""
    for server in ({"compute": 0.44, "optimizer": 0.01}, {"exchange": 0.4, "optimizer": 0.06}):
        found = with_server(**server)
        assert found.slowest == 0
        said = sentence(ONE, found, MACHINE)
        assert "1 of 3 devices hold the parameters and compute nothing (1.3e+02 ms" in said
        assert "for which the others wait" not in said
    assert (found.communication, found.waiting) == pytest.approx((0.05, 0.0))


def test_a_slow_worker_beside_a_parameter_server_is_named():
    found = with_server({"exchange": 0.5}, {"forward": 0.8}, exchange=1.0)
    assert "rank 1, for which the others wait" in sentence(ONE, found, MACHINE)


def test_a_good_layout_is_not_accused():
    machine, base = MACHINE, a_row(2, {"forward": -0.002}, {"forward": -0.002})
    assert "nothing here limits scaling" in sentence(ONE, base, machine)


def test_a_job_that_waits_for_data_on_every_number_of_devices_is_told_so():
    """It scales, so the wait is no limit of that; but it is what makes the job slow."""
    waiting = {**ALONE, "data": 2.0}
    alone = row("single on 1", "single", 1, [a_round(waiting)], [a_round(waiting)])
    ranks = [{name: seconds / 2 for name, seconds in waiting.items()}] * 2
    two = row("ddp on 2", "ddp", 2, [a_round(*ranks)], [a_round(waiting)])
    said = sentence(alone, two, MACHINE)
    assert "it waits for data for 71 % of a step: raise data.workers above 1" in said
    assert "waits for data" not in sentence(ONE, a_row(2, {}, {}), MACHINE)
