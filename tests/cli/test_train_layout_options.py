"""The options that ``verify`` and ``scale`` share."""

import argparse

import pytest

from lockstep.cli.train import device_counts, job_on_one_device, strategy_names
from lockstep.errors import ConfigError


def test_numbers_and_names_are_read_as_they_stand():
    assert device_counts(" 4, 1,4,") == [4, 1, 4]
    assert strategy_names("fsdp, ddp") == ["fsdp", "ddp"]
    assert device_counts("") == strategy_names("") == []


@pytest.mark.parametrize("text", ["two", "0", "-1", "1,2.5"])
def test_a_number_of_devices_is_at_least_one(text):
    with pytest.raises(ConfigError, match=f"--devices '{text}' is not a list of numbers"):
        device_counts(text)


def test_an_unknown_strategy_is_answered_by_the_nearest():
    with pytest.raises(ConfigError, match=r"strategy 'fsdpp' is not known\. Did you mean 'fsdp'"):
        strategy_names("ddp,fsdpp")


def test_the_job_is_checked_as_one_device_runs_it_whatever_devices_were_asked_for():
    config = job_on_one_device("digits", argparse.Namespace(set=[], devices="2,4", strategies="", threads="3"))
    assert config.run.devices == 1
    assert config.run.threads == 3
