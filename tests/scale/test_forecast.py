"""A forecast and its tables."""

from lockstep.scale.prediction import (
    CheckedPrediction,
    Forecast,
    Interconnect,
    NetworkLink,
    OneDevice,
    checked_table,
    message_table,
    predict,
    world_table,
)

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
CHECKED = CheckedPrediction("ddp on 2", 2, predicted=9.0, measured=10.0)
WORLDS = tuple(predict(ONE, devices, IDEAL, adding=1e30) for devices in (8, 16))
FORECAST = Forecast(ONE, 1e10, {2: {4096: 0.001}, 4: {4096: 0.002}}, (CHECKED,), WORLDS)


def test_a_prediction_is_shown_with_its_error():
    assert checked_table(FORECAST)[1:] == [("ddp on 2", "9", "10", "-10 %")]


def test_worlds_that_need_another_recipe_are_marked_and_explained():
    assert world_table(FORECAST) == [("devices", "ideal"), ("8", "10 (100 %)"), ("16 *", "5 (100 %)")]
    assert "Beyond 8 devices" in FORECAST.note


def test_the_exchange_alone_is_shown_by_size_and_ranks():
    assert message_table(FORECAST) == [("bytes", "2 ranks", "4 ranks"), ("4,096", "1", "2")]
