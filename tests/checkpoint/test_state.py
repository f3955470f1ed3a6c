import json

import pytest
import torch
from torch import nn

from lockstep.checkpoint import encoded_extra_states, load_extra_states, load_model_state, model_state
from lockstep.errors import CheckpointMismatch, ConfigError


def test_a_tied_tensor_is_stored_once_and_its_other_name_recorded(tied):
    tensors, aliases = model_state(tied)
    assert aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in tensors
    assert "body.1.running_mean" in tensors


def test_equal_values_in_memory_of_their_own_are_not_tied():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].load_state_dict(model["a"].state_dict())
    assert model_state(model)[1] == {}


def test_loading_keeps_ties_strides_and_bits():
    source = nn.Conv2d(3, 4, 3)
    source.weight.data[0, 0, 0, 0] = float("nan")
    target = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides, place = target.weight.stride(), target.weight.data_ptr()
    load_model_state(target, *model_state(source))
    assert (target.weight.stride(), target.weight.data_ptr()) == (strides, place)
    assert torch.equal(target.weight.view(torch.int32), source.weight.view(torch.int32))


@pytest.mark.fault("K6")
def test_every_difference_is_listed_and_nothing_is_copied():
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    target = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4).double(), nn.Identity(), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointMismatch) as raised:
        load_model_state(target, *model_state(source))
    message = str(raised.value)
    assert "missing (2): 3.weight, 3.bias" in message
    assert "unexpected (2): 2.weight, 2.bias" in message
    assert "other shape (2): 0.weight [4, 3] instead of [5, 3]" in message
    assert "other dtype (2): 1.weight torch.float32 instead of torch.float64" in message
    assert raised.value.exit_code == 2
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_long_list_of_differences_is_cut_and_counted():
    source = nn.Sequential(*[nn.Linear(1, 1) for _ in range(30)])
    with pytest.raises(CheckpointMismatch, match=r"unexpected \(60\): .* and 40 more"):
        load_model_state(nn.Sequential(), *model_state(source))


def test_a_model_that_ties_other_parameters_is_refused(tied):
    apart = type(tied)()
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    with pytest.raises(CheckpointMismatch, match=r"head.weight = embed.weight"):
        load_model_state(apart, *model_state(tied))


class Counter(nn.Module):
    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "weights": (torch.ones(2), None)}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_is_written_beside_the_tensors_and_given_back():
    model, again, tensors = nn.Sequential(Counter()), nn.Sequential(Counter()), {}
    model[0].calls = 3
    assert model_state(model) == ({}, {})
    encoded = encoded_extra_states(dict(model.named_modules()), tensors)
    load_extra_states(dict(again.named_modules()), json.loads(json.dumps(encoded)), tensors)
    assert again[0].calls == 3 and len(tensors) == 1
    with pytest.raises(CheckpointMismatch, match="extra state of the module '0', which has no set_extra_state"):
        load_extra_states({"0": nn.ReLU()}, encoded, tensors)


def test_extra_state_that_no_checkpoint_can_hold_is_refused_by_name():
    model = nn.Sequential(Counter())
    model[0].calls = object()
    with pytest.raises(ConfigError, match=r"'extra state of 0.calls' is a object"):
        encoded_extra_states(dict(model.named_modules()), {})
