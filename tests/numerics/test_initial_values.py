"""Models that are built without values: how the values are made later, tensor by tensor."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.numerics.initial_values import InitialValues, empty_tensors

CPU = torch.device("cpu")


class Parts(nn.Module):
    """One of each way in which constructors make and change values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.scaled = nn.Parameter(torch.randn(3) * 0.02)
        self.norm = nn.Parameter(torch.ones(3))
        self.cut = nn.Parameter(torch.empty(30, 2))
        self.unit = nn.Conv1d(3, 3, 3)
        self.register_buffer("untouched", torch.empty(3))
        self.embedding = nn.Embedding(5, 3, padding_idx=0)
        self.lstm = nn.LSTM(2, 3)
        self.normalised = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)
        self.places = torch.arange(3)
        nn.init.trunc_normal_(self.cut, std=1.0, a=-0.5, b=0.5)
        nn.init.dirac_(self.unit.weight)
        nn.init.orthogonal_(self.linear.weight)
        self.embedding.weight.data[1].copy_(self.scaled)
        self.embedding.weight.data[2].normal_(10.0, 0.01)
        with torch.no_grad():
            self.scaled.add_(self.norm)
        self.apply(self.reset)

    def reset(self, module):
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.constant_(module.bias, 0.5)


def built(seed=3, build=Parts):
    values = InitialValues(seed)
    with values.recording():
        return build(), values


def filled(seed=3, order=1):
    model, values = built(seed)
    for named in [*empty_tensors(model)][::order]:
        values.fill([named], CPU)
    return model


def test_values_are_those_that_the_constructor_makes():
    model = filled()
    assert not [*empty_tensors(model)]
    orthogonal = model.linear.weight.T @ model.linear.weight
    assert torch.allclose(orthogonal, torch.eye(3), atol=1e-6)
    assert model.tied.weight is model.linear.weight
    assert model.linear.bias.tolist() == [0.5] * 4
    assert model.norm.tolist() == [1, 1, 1] and not model.untouched.any()
    assert not model.embedding.weight[0].any() and (model.embedding.weight[2] - 10).abs().max() < 0.1
    # The row was copied before it was changed
    assert torch.equal(model.embedding.weight[1] + 1, model.scaled)
    assert 0.3 < model.cut.abs().max() <= 0.5 and model.cut.unique().numel() == 60
    assert torch.equal(model.unit.weight, nn.init.dirac_(torch.empty(3, 3, 3)))
    assert model.given.tolist() == [1, 2] and model.places.tolist() == [0, 1, 2]
    assert torch.equal(model.mask, torch.tril(torch.ones(3, 3)))
    model.lstm(torch.ones(2, 1, 2))
    model.normalised(torch.ones(1, 2))


def test_values_depend_on_the_seed_and_not_on_who_is_first():
    torch.manual_seed(0)
    one, other = filled(), filled(order=-1)
    torch.rand(5)
    again = filled()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]) and torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(one.scaled, filled(seed=4).scaled)


def test_the_stream_of_random_numbers_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    filled()
    assert torch.equal(torch.rand(2), expected)


def test_parameters_stay_the_same_objects():
    model, values = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values.fill(empty_tensors(model), CPU)
    model.linear(torch.ones(1, 3)).sum().backward()
    before = model.linear.bias.detach().clone()
    optimizer.step()
    assert torch.equal(model.linear.bias, before - 1)


def test_digest_tells_two_ways_of_building_apart():
    assert built()[1].digest() == built()[1].digest() != ""
    assert built(build=lambda: nn.Linear(2, 2))[1].digest() != built()[1].digest()
    assert built(build=lambda: torch.tensor([1]))[1].digest() != built(build=lambda: torch.tensor([2]))[1].digest()
    assert InitialValues(0).digest() == ""


def test_a_tensor_that_was_changed_afterwards_is_refused():
    model, values = built()
    nn.init.zeros_(model.linear.weight)
    with pytest.raises(
        ConfigError, match=r"'linear.weight' was changed after the model was built.*within run\.empty_model"
    ):
        values.fill(empty_tensors(model), CPU)


def test_a_constructor_that_asks_for_values_is_refused():
    with pytest.raises(ConfigError, match=r"values were asked for.*device='cpu'"):
        built(build=lambda: [each.item() for each in torch.linspace(0, 1, 3)])
    assert built(build=lambda: [each.item() for each in torch.linspace(0, 1, 3, device="cpu")])[0][1] == 0.5


def test_a_generator_of_its_own_is_refused():
    generator = torch.Generator()
    with pytest.raises(ConfigError, match="draws from a generator of its own"):
        built(build=lambda: torch.empty(3).normal_(generator=generator))


def test_a_parameter_that_nobody_initialises_is_refused():
    model, values = built(build=lambda: nn.ParameterList([torch.empty(3, 2)]))
    with pytest.raises(ConfigError, match=r"Nothing gave values to '0'"):
        values.fill(empty_tensors(model), CPU)


def test_values_that_follow_from_a_tensor_without_any_are_refused():
    other = torch.ones(3, device="meta")
    model, values = built(build=lambda: nn.ParameterList([other * 2]))
    with pytest.raises(ConfigError, match=r"put on the device 'meta' outside of run\.empty_model"):
        values.fill(empty_tensors(model), CPU)


def test_what_was_not_built_so_is_not_known():
    _, values = built()
    assert not values.knows(torch.ones(3, device="meta")) and not values.knows(torch.ones(3))
