import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import canonical, decode, encode
from lockstep.errors import CheckpointError, ConfigError

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
_KEYS = st.sampled_from(["tuple", "dict", "float", "tensor", "lr"]) | st.integers(0, 9)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
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
