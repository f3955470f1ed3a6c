import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.checks import (
    CheckedOptions,
    DeviceRequest,
    Problem,
    at_least,
    device_request,
    devices,
    file_path,
    from_plain,
    import_path,
    more_than,
    near_path,
    one_of,
    plain_name,
    python_type_problem,
    refuse,
    seconds,
    seed,
    unless_empty,
    workers,
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
    name = plain_name(10)
    assert name("digits-001") is None and unless_empty(name)("") is None
    assert name("") and name("-x") and name("a/b") and unless_empty(name)("a/b")
    assert name("数数数") is None and "at most 10 bytes and has 12" in name("数数数数")


def test_paths_are_such_as_a_file_can_have(tmp_path):
    assert all(file_path(value) is None for value in ("", "runs/a b", "~/runs", tmp_path, "\udcff", True, False))
    assert "a character that no path has" in file_path("a\0b") and file_path("\ud800")
    assert "longer than one can be" in file_path("x" * 256) and file_path("x/" * 2048)
    assert "no such home folder" in file_path("~nobody-of-that-name/runs")


def test_times_are_such_as_torch_can_wait():
    assert seconds()(1e9) is None and seconds(or_none=True)(0) is None
    assert seconds()(0) and seconds()(1e10) and seconds(or_none=True)(-1) and seconds()(float("nan"))


def test_devices_and_workers_are_so_many_as_a_host_can_have():
    assert workers(4096) is None and workers(4097) and devices("cpu:4096") is None
    assert "at most 4096 processes" in devices("cpu:5000") and devices("9" * 5000)


def test_all_fields_are_checked_and_every_problem_is_said_at_once():
    @dataclass(frozen=True)
    class Numbers(CheckedOptions):
        first: int = field(default=1, metadata={"check": at_least(1)})
        second: int = field(default=1, metadata={"check": at_least(1)})

    with pytest.raises(ConfigError, match=r"Numbers\.first .* 0\. Numbers\.second .* -1\."):
        Numbers(0, -1)


@pytest.mark.parametrize(
    ("kind", "good", "wrong", "words"),
    [
        (int, [1, np.int64(2)], [1.5, "1", True], "an integer"),
        (float, [1, 0.5, np.float32(0.5)], ["1", False], "a number"),
        (bool, [True], ["False", 1], "true or false"),
        (str, ["a"], [1, Path("a")], "a string"),
        (int | str | None, [1, "a", None], [1.5, True], "an integer or a string"),
        (str | Path, ["a", Path("a")], [1, None], "a string"),
        (tuple[str, ...], [["a"], ()], ["a", [1]], "a list of strings"),
        (dict[str, int], [{}, "any"], [], ""),
    ],
)
def test_values_of_a_script_are_of_the_type_of_their_field(kind, good, wrong, words):
    assert [python_type_problem(kind, value) for value in good] == [None] * len(good)
    assert [python_type_problem(kind, each) for each in wrong] == [f"should be {words} and is {v!r}." for v in wrong]


def test_no_problem_is_no_error():
    refuse([])
    with pytest.raises(ConfigError, match=r"data\.0 is odd\."):
        refuse([Problem(("data", 0), "is odd.")])


class _Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class _Inner:
    numbers: tuple[float, ...]
    pair: tuple[str, int]
    name: int | str


@dataclass(frozen=True)
class _Outer:
    colour: _Colour
    inner: _Inner | None
    by_rank: dict[int, list[_Inner]]
    anything: Any = None


def test_a_dataclass_is_read_back_from_what_json_makes_of_it():
    inner = _Inner((1.0, 2.5), ("a", 3), "no index")
    for whole in (
        _Outer(_Colour.RED, None, {}),
        _Outer(_Colour.RED, inner, {4: [inner, inner]}, {"a": [None]}),
    ):
        text = json.dumps({**asdict(whole), "colour": whole.colour.value})
        assert from_plain(_Outer, json.loads(text)) == whole


def test_a_path_names_the_entry_that_is_spelled_alike(tmp_path):
    (tmp_path / "train.py").touch()
    assert near_path(tmp_path / "trian.py") == f" Did you mean '{tmp_path / 'train.py'}'?"
    assert near_path(tmp_path / "evaluate.py") == ""
    assert near_path(tmp_path / "train.py") == ""
    assert near_path(tmp_path / "nowhere" / "train.py") == near_path("a\0b/train.py") == ""
