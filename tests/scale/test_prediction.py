"""Predicted worlds, from what one device takes."""

import dataclasses

import pytest

from lockstep.errors import ConfigError
from lockstep.scale.measured import Round, row
from lockstep.scale.prediction import (
    PRESETS,
    WORLDS,
    CheckedPrediction,
    Forecast,
    Interconnect,
    NetworkLink,
    OneDevice,
    checked_table,
    message_table,
    predict,
    predict_here,
    world_table,
)
from lockstep.scale.report import ScaleReport, text

IDEAL = Interconnect("ideal", NetworkLink(0.0, 1e30), NetworkLink(0.0, 1e30))
ONE = OneDevice(
    micro_batch=0.1,
    backward=0.06,
    data=0.0,
    rest=0.0,
    samples=12800,
    micro_batches=8,
    micro_batch_size=16,
    gradient_bytes=40_000_000,
    reduce="ring",
)


def test_one_device_is_read_from_its_phases():
    phases = {"data": 0.4, "forward": 1.6, "backward": 3.2, "compute": 0.8, "exchange": 0.1, "optimizer": 0.2}
    measured = Round(6.3, 128.0, (phases,), 100, 12800, 4000, 8, 16)
    one = OneDevice.of(row("single on 1", "single", 1, [measured], [measured]), measured, "ordered")
    assert one.micro_batch == pytest.approx(0.7)
    assert one.backward == pytest.approx(0.4)
    assert one.rest == pytest.approx(0.3)
    assert one.data == pytest.approx(0.4)
    assert (one.samples, one.gradient_bytes) == (12800, 4000)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_without_anything_in_the_way_devices_are_used_in_full(devices):
    found = predict(ONE, devices, IDEAL, adding=1e30)
    assert found.efficiency == pytest.approx(1.0)
    assert found.epoch == pytest.approx(100 * 0.8 / devices)
    assert found.same_recipe


def test_devices_that_do_not_divide_k_wait_for_the_longest_share():
    found = predict(ONE, 3, IDEAL, adding=1e30)
    assert found.step == pytest.approx(3 * 0.1)
    assert found.efficiency == pytest.approx(8 / 9)


def test_what_each_device_does_for_itself_is_not_shared_but_data_is():
    one = dataclasses.replace(ONE, rest=0.2, data=0.4)
    assert predict(one, 4, IDEAL, adding=1e30).step == pytest.approx(0.2 + 0.2 + 0.1)


def test_beyond_k_the_recipe_grows_and_says_so():
    found = predict(ONE, 32, IDEAL, adding=1e30)
    assert not found.same_recipe
    assert found.step == pytest.approx(0.1), "one micro-batch each"
    assert found.epoch == pytest.approx(12800 / (32 * 16) * 0.1)
    assert found.efficiency == pytest.approx(1.0)


def test_an_epoch_takes_whole_steps():
    """An epoch of 1,536 samples took 1.5 steps of 1,024."""
    assert predict(ONE, 4096, IDEAL, adding=1e30).epoch == pytest.approx(0.1)
    one = dataclasses.replace(ONE, samples=12 * 128)
    assert predict(one, 64, IDEAL, adding=1e30).epoch == pytest.approx(0.2)


def test_a_short_last_step_counts_as_the_samples_that_it_has():
    """An epoch of 160 samples was said to take two steps of 160."""
    measured = dataclasses.replace(MEASURED, steps_per_epoch=2, samples_per_epoch=160)
    one = OneDevice.of(row("single on 1", "single", 1, [measured], [measured]), measured, "ring")
    found = predict(one, 10, IDEAL, adding=1e30)
    assert found.epoch == found.step


def test_half_the_bytes_take_half_the_time_where_latency_is_nothing():
    by = Interconnect("slow", NetworkLink(0.0, 1e6), NetworkLink(0.0, 1e6))
    slow = dataclasses.replace(ONE, backward=0.0)
    times = {
        name: predict(dataclasses.replace(slow, reduce=name), 8, by, adding=1e30).exchange
        for name in ("ring", "ordered", "bf16")
    }
    assert times["ordered"] == pytest.approx(times["ring"])
    assert times["bf16"] == pytest.approx(times["ordered"] / 2)


def test_bf16_has_the_buckets_and_the_additions_of_float32():
    """It had half as many buckets, and half the additions."""
    latency = Interconnect("far", NetworkLink(0.01, 1e30), NetworkLink(0.01, 1e30))
    slow = dataclasses.replace(ONE, backward=0.0)
    for by, adding in ((latency, 1e30), (IDEAL, 1e6)):
        times = [predict(dataclasses.replace(slow, reduce=name), 8, by, adding) for name in ("ordered", "bf16")]
        assert times[0].exchange == pytest.approx(times[1].exchange)
        assert times[0].exchange > 0.1


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "reduce", ["ordered", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "bf16"))]
)
def test_no_preset_is_better_than_ideal_in_any_world(name, reduce):
    one = dataclasses.replace(ONE, reduce=reduce)
    found = [predict(one, devices, PRESETS[name], adding=1e10) for devices in WORLDS]
    assert [each.devices for each in found] == [2**power for power in range(1, 13)]
    assert all(0.0 < each.efficiency < 1.0 for each in found)
    assert found[0].efficiency > found[-1].efficiency


def test_on_this_machine_nothing_is_hidden_and_cores_are_shared():
    messages = {1_000_000: 0.01, 100_000_000: 1.0}
    exchange = 0.01 + 0.99 * 39 / 99
    assert predict_here(ONE, 2, messages, busy=0.5).step == pytest.approx(0.4 + exchange)
    assert predict_here(ONE, 4, messages, busy=2.0).step == pytest.approx(2 * 0.2 + exchange)


MEASURED = Round(1.0, 128.0, ({"forward": 1.0},), 100, 12800, 4000, 8, 16)


def test_a_reducer_without_a_formula_is_refused():
    with pytest.raises(ConfigError, match=r"no formula for training.reduce = 'powersgd'"):
        OneDevice.of(row("single on 1", "single", 1, [MEASURED], [MEASURED]), MEASURED, "powersgd")


def test_the_terminal_shows_all_interconnects_within_100_columns():
    worlds = [predict(ONE, devices, by, adding=1e10) for by in PRESETS.values() for devices in (2, 4096)]
    found = Forecast(ONE, 1e10, {2: {4096: 0.001}}, (), tuple(worlds))
    single = row("single on 1", "single", 1, [MEASURED], [MEASURED])
    lines = text(ScaleReport("digits", 20, 1, (single,), "Nothing.", forecast=found)).splitlines()
    heads = [line.split() for line in lines if line.startswith("devices ")]
    assert [name for head in heads for name in head[1:]] == list(PRESETS)
    assert max(len(line) for line in lines if line != found.note) <= 100
    assert sum(line.startswith("4096 *") for line in lines) == len(heads) > 1


CHECKED = CheckedPrediction("ddp on 2", 2, predicted=9.0, measured=10.0)
_TWO = tuple(predict(ONE, devices, IDEAL, adding=1e30) for devices in (8, 16))
FORECAST = Forecast(ONE, 1e10, {2: {4096: 0.001}, 4: {4096: 0.002}}, (CHECKED,), _TWO)


def test_a_prediction_is_shown_with_its_error():
    assert checked_table(FORECAST)[1:] == [("ddp on 2", "9", "10", "-10 %")]


def test_worlds_that_need_another_recipe_are_marked_and_explained():
    assert world_table(FORECAST) == [("devices", "ideal"), ("8", "10 (100 %)"), ("16 *", "5 (100 %)")]
    assert "Beyond 8 devices" in FORECAST.note
    assert "The efficiency is that of full steps." in FORECAST.note, "64 devices were 24 times as fast, beside 51 %"


def test_the_exchange_alone_is_shown_by_size_and_ranks():
    assert message_table(FORECAST) == [("bytes", "2 ranks", "4 ranks"), ("4,096", "1", "2")]
