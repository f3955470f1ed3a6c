from dataclasses import dataclass, field

import pytest

from lockstep.config.checks import (
    CheckedOptions,
    DeviceRequest,
    Problem,
    at_least,
    device_request,
    import_path,
    more_than,
    one_of,
    plain_name,
    refuse,
    seed,
)
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("auto", DeviceRequest()),
        (2, DeviceRequest(count=2)),
        ("cpu", DeviceRequest(is_cpu=True)),
        ("cpu:4", DeviceRequest(count=4, is_cpu=True)),
        ("0,5", DeviceRequest(indices=(0, 5))),
        ("3,", DeviceRequest(indices=(3,))),
    ],
)
def test_devices_are_read_as_a_user_writes_them(text, request_):
    assert device_request(text) == request_


@pytest.mark.parametrize(("text", "reason"), [("gpu", "should be a number"), (0, "at least 1")])
def test_devices_that_cannot_be_are_refused_with_the_reason(text, reason):
    assert reason in device_request(text)


def test_numbers_have_limits_and_nan_is_none():
    assert at_least(1)(1) is None and at_least(1)(0) and at_least(1)(float("nan"))
    assert more_than(0)(0.1) is None and more_than(0)(0)
    assert seed((1 << 63) - 1) is None and seed(1 << 63) and seed(-1)


def test_names_and_import_paths():
    assert one_of("ddp", "dp")("ddp") is None and "'ddp'" in one_of("ddp", "dp")("ddq")
    assert import_path("torch.optim:SGD") is None
    assert "Did you mean 'torch.optim:SGD'?" in import_path("torch.optim.SGD")
    assert plain_name("digits-001") is None and plain_name("") is None
    assert plain_name("-x") and plain_name("a/b")


def test_all_fields_are_checked_and_every_problem_is_said_at_once():
    @dataclass(frozen=True)
    class Numbers(CheckedOptions):
        first: int = field(default=1, metadata={"check": at_least(1)})
        second: int = field(default=1, metadata={"check": at_least(1)})

    with pytest.raises(ConfigError, match=r"Numbers\.first .* 0\. Numbers\.second .* -1\."):
        Numbers(0, -1)


def test_no_problem_is_no_error():
    refuse([])
    with pytest.raises(ConfigError, match=r"data\.0 is odd\."):
        refuse([Problem(("data", 0), "is odd.")])
