import copy
import json

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, RMSprop

from lockstep.checkpoint import (
    CheckpointState,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parameter_names,
    read,
    write,
)
from lockstep.errors import CheckpointMismatch, ConfigError

_KINDS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.8, 0.99)),
    "adamw with a tensor rate": lambda parameters: AdamW(parameters, lr=torch.tensor(0.01)),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.01),
    "adadelta": Adadelta,
    "nadam": NAdam,
}


def bits(model, optimizer):
    names = parameter_names(model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return found | {key: value.clone() for key, value in optimizer_state(optimizer, names)[0].items()}


def assert_equal_bits(left, right):
    assert set(left) == set(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("kind", _KINDS)
def test_training_goes_on_bit_for_bit_after_a_round_trip(kind, tied, training, tmp_path):
    optimizer = _KINDS[kind](tied.parameters())
    training(tied, optimizer, 3)
    tensors, record = optimizer_state(optimizer, parameter_names(tied))
    values, aliases = model_state(tied)
    path = write(tmp_path, CheckpointState(values, tensors, {}, aliases, {"main": record}), step=3)
    resumed = type(tied)()
    other = _KINDS[kind](resumed.parameters())
    training(resumed, other, 1)
    state = read(path)
    load_model_state(resumed, state.model, state.aliases)
    load_optimizer_state(other, parameter_names(resumed), state.optimizer, state.optimizer_records["main"])
    training(tied, optimizer, 4, first=3)
    training(resumed, other, 4, first=3)
    assert_equal_bits(bits(tied, optimizer), bits(resumed, other))


def test_a_never_used_parameter_stays_without_state(tied, training):
    optimizer = AdamW(tied.parameters())
    training(tied, optimizer, 2)
    tensors, record = optimizer_state(optimizer, parameter_names(tied))
    assert "never_used" not in record["state"]
    assert "embed.weight|exp_avg" in tensors
    other = AdamW(tied.parameters())
    load_optimizer_state(other, parameter_names(tied), tensors, record)
    assert tied.never_used not in other.state


def test_state_moves_to_another_order_and_grouping_of_the_parameters(tied, training):
    optimizer = AdamW(tied.parameters(), lr=0.05)
    training(tied, optimizer, 3)
    names = parameter_names(tied)
    tensors, record = optimizer_state(optimizer, names)
    resumed = copy.deepcopy(tied)
    parameters = list(reversed(list(resumed.parameters())))
    other = AdamW([{"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:], "weight_decay": 0.5}])
    load_optimizer_state(other, parameter_names(resumed), tensors, record)
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.05]
    training(tied, optimizer, 3, first=3)
    training(resumed, other, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(tied.parameters(), resumed.parameters()))


def test_groups_with_other_hyperparameters_cannot_be_joined(tied):
    groups = [{"params": [tied.embed.weight], "lr": 0.1}, {"params": list(tied.body.parameters()), "lr": 0.2}]
    names = parameter_names(tied)
    tensors, record = optimizer_state(SGD(groups), names)
    joined = SGD([tied.embed.weight, *tied.body.parameters()], lr=0.3)
    with pytest.raises(CheckpointMismatch, match=r"'embed.weight' and 'body.0.weight' into one"):
        load_optimizer_state(joined, names, tensors, record)
    assert joined.param_groups[0]["lr"] == 0.3


def test_names_with_dots_and_bars_are_told_apart():
    model = nn.ModuleDict({"a|b": nn.Linear(2, 2), "a": nn.ModuleDict({"b|momentum_buffer": nn.Linear(2, 2)})})
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    tensors, record = optimizer_state(optimizer, parameter_names(model))
    other = SGD(model.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, parameter_names(model), tensors, record)
    for number, parameter in enumerate(model.parameters()):
        assert other.state[parameter]["momentum_buffer"].unique().item() == number + 1


def test_state_takes_the_strides_of_a_channels_last_parameter():
    model = nn.Conv2d(3, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, record = optimizer_state(optimizer, parameter_names(model))
    target = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other = SGD(target.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, parameter_names(target), tensors, record)
    buffer = other.state[target.weight]["momentum_buffer"]
    assert buffer.stride() == target.weight.stride()
    assert torch.equal(buffer, optimizer.state[model.weight]["momentum_buffer"])


def test_the_implementation_of_the_running_optimizer_stays(tied, training):
    optimizer = AdamW(tied.parameters(), foreach=True)
    training(tied, optimizer, 1)
    tensors, record = optimizer_state(optimizer, parameter_names(tied))
    other = AdamW(tied.parameters(), foreach=False)
    load_optimizer_state(other, parameter_names(tied), tensors, record)
    assert other.param_groups[0]["foreach"] is False


def test_loaded_state_is_not_shared_with_the_checkpoint(tied, training):
    optimizer = SGD(tied.parameters(), lr=0.1, momentum=0.9)
    training(tied, optimizer, 1)
    tensors, record = optimizer_state(optimizer, parameter_names(tied))
    stored = {key: value.clone() for key, value in tensors.items()}
    other = SGD(tied.parameters(), lr=0.1, momentum=0.9)
    load_optimizer_state(other, parameter_names(tied), stored, record)
    training(tied, other, 1)
    assert all(torch.equal(stored[key], tensors[key]) for key in stored)


def test_another_optimizer_or_other_parameters_are_refused(tied):
    names = parameter_names(tied)
    tensors, record = optimizer_state(SGD(tied.parameters(), lr=0.1), names)
    with pytest.raises(
        CheckpointMismatch, match=r"state of torch.optim.sgd.SGD, and this run uses torch.optim.adam.Adam"
    ):
        load_optimizer_state(Adam(tied.parameters()), names, tensors, record)
    with pytest.raises(CheckpointMismatch, match=r"unexpected \(2\): body.1.bias, body.1.weight"):
        fewer = [p for name, p in tied.named_parameters() if not name.startswith("body.1")]
        load_optimizer_state(SGD(fewer, lr=0.1), names, tensors, record)


def test_a_parameter_the_model_does_not_have_is_refused(tied):
    with pytest.raises(ConfigError, match=r"shape \[7\] that the model does not have"):
        optimizer_state(SGD([nn.Parameter(torch.ones(7))], lr=0.1), parameter_names(tied))


def test_one_tensor_under_several_names_of_an_optimizer_is_one_again():
    """Each name got a copy: a step that changes it under one name, and reads it under another, had other bits."""

    def made(rate):
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": rate}, {"params": [model.bias], "lr": rate}]
        return model, torch.optim.SGD(groups)

    model, optimizer = made(torch.tensor(0.1))
    weight, bias = (optimizer.state[each] for each in model.parameters())
    weight["sum"] = weight["also"] = torch.ones(2, 2)
    weight["other"] = torch.ones(2, 2)
    weight["count"] = bias["count"] = optimizer.state["count"] = torch.zeros(())
    weight["values"] = [model.weight.detach(), model.bias.detach()]
    tensors, record = optimizer_state(optimizer, parameter_names(model))
    record = json.loads(json.dumps(record))
    again, resumed = made(torch.tensor(0.2))
    load_optimizer_state(resumed, parameter_names(again), tensors, record)
    rates = [group["lr"] for group in resumed.param_groups]
    weight, bias = (resumed.state[each] for each in again.parameters())
    assert weight["sum"] is weight["also"] and weight["other"] is not weight["sum"]
    assert weight["count"] is bias["count"] is resumed.state["count"]
    assert rates[0] is rates[1] and rates[0] == torch.tensor(0.1)
    pairs = zip(weight["values"], again.parameters(), strict=True)
    assert all(value.data_ptr() == parameter.data_ptr() for value, parameter in pairs)
    del record["same"]  # a checkpoint of an earlier version
    load_optimizer_state(resumed, parameter_names(again), tensors, record)
    assert resumed.state[again.weight]["sum"] is not resumed.state[again.weight]["also"]


def test_a_tensor_that_an_optimizer_shares_with_the_one_that_it_wraps_is_one_again():
    """As a Lookahead that keeps the momentum of its optimizer: a resumed run ended in other bits, without a word."""

    class Wraps(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

    def made():
        model = nn.Linear(2, 3)
        return model, Wraps(SGD(model.parameters(), lr=0.1))

    model, optimizer = made()
    shared = torch.arange(6.0).view(2, 3).T  # strides that no parameter has
    optimizer.inner.state[model.weight]["momentum_buffer"] = optimizer.state[model.weight]["kept"] = shared
    optimizer.state[model.weight]["other"] = shared.clone()
    tensors, record = optimizer_state(optimizer, parameter_names(model))
    record = json.loads(json.dumps(record))
    again, resumed = made()
    load_optimizer_state(resumed, parameter_names(again), tensors, record)
    state = resumed.state[again.weight]
    assert resumed.inner.state[again.weight]["momentum_buffer"] is state["kept"] is not state["other"]
    assert torch.equal(state["kept"], shared) and state["kept"].stride() == shared.stride()
    del record["same"]  # a checkpoint of an earlier version
    load_optimizer_state(resumed, parameter_names(again), tensors, record)
    assert torch.equal(resumed.inner.state[again.weight]["momentum_buffer"], shared)


def test_a_sparse_tensor_of_an_optimizer_is_refused_by_name():
    """It ended in a traceback of torch."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["graph"] = torch.eye(2).to_sparse()
    with pytest.raises(ConfigError, match=r"'weight\|graph' is a Tensor of layout torch.sparse_coo, which a check"):
        optimizer_state(optimizer, parameter_names(model))
