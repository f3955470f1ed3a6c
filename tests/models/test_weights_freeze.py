import copy

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models import freeze, resnet18, transformer
from lockstep.models.weights import describe_frozen


@pytest.fixture
def model():
    return resnet18(num_classes=3)


def test_everything_but_the_head_can_be_frozen(model):
    assert freeze(model, ["*", "!fc"]) == ["fc.weight", "fc.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]


def test_later_patterns_win(model):
    trained = freeze(model, ["*", "!layer4", "layer4.*.bn*", "!layer4.1.bn2.bias", "!fc"])
    assert "layer4.0.conv1.weight" in trained
    assert "layer4.0.bn1.weight" not in trained
    assert "layer4.1.bn2.bias" in trained
    assert "layer3.0.conv1.weight" not in trained


def test_no_pattern_freezes_nothing(model):
    assert freeze(model, []) == [name for name, _ in model.named_parameters()]


def test_a_name_means_that_module_and_not_one_that_begins_alike():
    model = nn.ModuleDict({"fc": nn.Linear(1, 1), "fc2": nn.Linear(1, 1)})
    assert freeze(model, ["fc"]) == ["fc2.weight", "fc2.bias"]


@pytest.mark.parametrize(
    "pattern, nearest", [("!fcc", "'!fc'"), ("layr1", "'layer1'"), ("conv1.wieght", "'conv1.weight'")]
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name(model, pattern, nearest):
    with pytest.raises(ConfigError, match=f"matches no parameter or module. Did you mean {nearest}"):
        freeze(model, ["*", pattern])


def test_a_module_without_parameters_is_no_match_and_those_with_some_are_named():
    chain = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    words = r"'!1' matches no parameter or module. The model's parameters are in: 0 \(Linear\), 2 \(Linear\)"
    with pytest.raises(ConfigError, match=words):
        freeze(chain, ["*", "!1"])


def test_the_log_says_what_is_trained_and_which_statistics_change(model):
    trained = freeze(model, ["*", "!fc"])
    assert describe_frozen(model, trained) == (
        "2 of 62 parameters are trained: fc.weight, fc.bias. The running statistics of 20 frozen BatchNorm layers "
        "still change; weights.freeze_statistics=true keeps them."
    )
    trained = freeze(model, ["*", "!fc"], freeze_statistics=True)
    assert describe_frozen(model, trained) == "2 of 62 parameters are trained: fc.weight, fc.bias."


def test_freezing_everything_is_refused(model):
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(model, ["*"])


def test_a_tied_parameter_is_reached_by_each_of_its_names():
    model = transformer(vocabulary_size=9, width=8, depth=1, heads=2, tied=True)
    trained = freeze(model, ["*", "!head"])
    assert trained == ["embed.table.token.weight"]


def test_only_trained_parameters_get_gradients(model):
    freeze(model, ["*", "!fc"])
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert model.conv1.weight.grad is None
    assert model.fc.weight.grad is not None


@pytest.mark.parametrize("freeze_statistics", [False, True])
def test_statistics_of_a_frozen_batchnorm_stay_only_where_asked(model, freeze_statistics):
    freeze(model, ["*", "!fc", "!bn1.bias"], freeze_statistics=freeze_statistics)
    model = copy.deepcopy(model).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(4, 3, 32, 32))
    changed = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert {"bn1.running_mean", "bn1.running_var"} <= changed, "bn1 is trained in part, so it goes on as usual"
    assert ("layer1.0.bn1.running_mean" in changed) != freeze_statistics
    assert ("layer4.1.bn2.num_batches_tracked" in changed) != freeze_statistics


def test_a_frozen_batchnorm_normalises_by_its_statistics_where_asked(model):
    freeze(model, ["*", "!fc"], freeze_statistics=True)
    images = torch.randn(4, 3, 32, 32)
    trained, evaluated = model.train()(images), model.eval()(images)
    assert torch.equal(trained, evaluated)
