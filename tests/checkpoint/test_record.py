import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.record import canonical, decode, encode
from lockstep.errors import CheckpointError, ConfigError

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
_KEYS = st.sampled_from(["tuple", "dict", "float", "float64", "tensor", "lr"]) | st.integers(0, 9)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def types(value):
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value), [types(item) for item in value]]
    return type(value)


@given(_VALUES)
def test_what_is_encoded_comes_back_equal_and_of_the_same_types(value):
    back = decode(json.loads(canonical(encode(value, "x"))))
    assert back == value
    assert types(back) == types(value)


def test_infinities_and_nan_survive():
    back = decode(json.loads(canonical(encode([math.inf, -math.inf, math.nan, -0.0], "x"))))
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1


def test_a_counter_comes_back_as_one():
    """It came back as a dict, whose update() sets what that of a counter adds."""
    value = {"seen": Counter(b=2, a=1), "kinds": Counter([0, 0, (1, 2)]), "none": Counter()}
    back = decode(json.loads(canonical(encode(value, "extra", ordered=True))))
    assert back == value and [*back["seen"]] == ["b", "a"]
    back["seen"].update({"a": 3})
    assert back["seen"] == {"b": 2, "a": 4}
    like_one = {"counter": {"a": 1}}
    assert decode(encode(like_one, "extra")) == like_one


def test_a_number_of_numpy_comes_back_as_one():
    """A float in its place is of 32 bits where it meets numbers of 32 bits."""
    value = [np.float64(0.1), np.float64("inf"), {"best": np.float64(-0.0)}]
    back = decode(json.loads(canonical(encode(value, "x"))))
    assert (repr(back), types(back)) == (repr(value), types(value))
    assert (np.ones(1, np.float32) * back[0]).dtype == np.float64
    with pytest.raises(CheckpointError):
        decode({"float64": "0,1"})


def test_tensors_inside_a_value_are_kept_beside_it_by_path():
    tensors = {}
    encoded = encode({"steps": (torch.tensor(3.0), [torch.ones(2)])}, "w|s", tensors)
    assert sorted(tensors) == ["w|s.steps.0", "w|s.steps.1.0"]
    assert torch.equal(decode(encoded, tensors)["steps"][1][0], torch.ones(2))


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(1), b"bytes", {"a": [object()]}])
def test_what_json_cannot_hold_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"'progress(\.a\.0)?' is a \w+"):
        encode(value, "progress")


@pytest.mark.parametrize(
    "record", [{"tuple": 3}, {"float": "os"}, {"tensor": "gone"}, {"dict": [[1]]}, {"dict": {"a": 1}}]
)
def test_a_record_with_an_unknown_tag_is_refused(record):
    with pytest.raises(CheckpointError, match=r"Unknown tag '.*' with .* in a checkpoint record"):
        decode(record, {})


def test_a_dict_comes_back_in_its_order_where_that_counts():
    """A resumed run read the entries of run.extra in the order of their names, and so added them up to other bits."""
    value = {"b": 1.0, "a": {"z": 1, "y": 2}, "c": [{"q": 1, "p": 2}]}
    read = decode(json.loads(canonical(encode(value, "x", ordered=True))))
    assert read == value and json.dumps(read) == json.dumps(value)
    assert encode({"a": 1, "b": 2}, "x", ordered=True) == {"a": 1, "b": 2}


def test_half_of_a_surrogate_pair_comes_back():
    """Names of files that are not in UTF-8 hold such; they ended in a UnicodeEncodeError."""
    value = {"a\udcff": "\ud800", "b": "ü"}
    assert decode(json.loads(canonical(encode(value, "x")))) == value


def test_what_holds_itself_or_has_too_many_digits_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ConfigError, match=r"'run\.extra' holds itself, or is nested too deeply"):
        encode({"x": endless}, "run.extra")
    with pytest.raises(ConfigError, match=r"'run\.extra\.x' is a number of too many digits"):
        encode({"x": 10**5000}, "run.extra")
    assert decode(json.loads(canonical(encode(10**4000, "x")))) == 10**4000
