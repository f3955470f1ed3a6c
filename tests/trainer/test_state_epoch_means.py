import json

from lockstep.trainer.state import EpochMeans

READINGS = [{"loss": 0.1 * n, "accuracy": 1 / (n + 1)} for n in range(7)]


def means(readings, before=None):
    found = EpochMeans(3, before)
    for reading in readings:
        found.add(reading)
    return found


def test_a_resumed_epoch_has_the_means_of_an_uninterrupted_one_to_the_last_bit():
    whole = means(READINGS).means()
    assert whole == {name: sum(r[name] for r in READINGS) / 7 for name in READINGS[0]}
    stored = json.loads(json.dumps(means(READINGS[:4]).as_dict()))
    assert means(READINGS[4:], stored).means() == whole


def test_what_another_epoch_has_left_is_not_taken_up():
    stored = EpochMeans(2).as_dict() | {"count": 5, "sums": {"loss": 9.0}}
    assert means(READINGS[:1], stored).means() == READINGS[0]


def test_there_is_no_mean_before_the_first_reading():
    assert EpochMeans(0).means() == {}
