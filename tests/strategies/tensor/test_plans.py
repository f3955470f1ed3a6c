"""Plans that split layers, and plans that are refused: no process needed."""

import pytest
import torch
from torch import nn

from lockstep.config.strategy_options import TensorOptions
from lockstep.errors import ConfigError
from lockstep.models import digits_net, lstm, perceptron, resnet18, resnet50, transformer
from lockstep.strategies.absent import Absence
from lockstep.strategies.tensor.layers import Splitter
from lockstep.strategies.tensor.plans import between, is_to_be_checked, plan_of


class Ranks:
    """An exchange that is never used."""

    def __init__(self, ranks, rank=0):
        self.ranks, self.rank, self.shards = ranks, rank, ranks


def split(model, ranks, plan=None):
    """Splits a model for one of the ranks."""
    splitter = Splitter(model, ranks, torch.device("cpu"), Absence("tensor", "each rank has a part of it"))
    return splitter.split(plan_of(model, ()) if plan is None else plan)


def chain(*layers):
    return nn.Sequential(*layers)


def test_the_transformer_splits_heads_and_perceptrons():
    plan = plan_of(transformer(vocabulary_size=9, width=8, depth=1, heads=2), ())
    assert plan == {
        "blocks.0.attention.1": "heads",
        "blocks.0.perceptron.1": "column",
        "blocks.0.perceptron.3": "row",
    }


def test_a_perceptron_splits_its_layers_in_pairs():
    plan = plan_of(perceptron(hidden=(8, 6, 4), dropout=0.1), ())
    assert plan == {"1": "column", "3": "features", "4": "row", "7": "column", "9": "features", "10": "row"}


def test_a_convolutional_chain_splits_what_lies_between_two_layers():
    plan = plan_of(digits_net(width=4), ())
    assert plan == {
        "2": "column",
        "3": "channels",
        "5": "row",
        "11": "column",
        "13": "features",
        "14": "row",
    }


def test_residual_blocks_split_their_inner_channels():
    plan = plan_of(resnet18(), ())
    assert plan["layer1.0.conv1"] == "column" and plan["layer1.0.bn1"] == "channels"
    assert plan["layer4.1.conv2"] == "row" and "layer1.0.bn2" not in plan and "fc" not in plan
    assert len(plan) == 8 * 3
    assert len(plan_of(resnet50(), ())) == 16 * 3


class Same(nn.ReLU):
    """A class of the user's that computes what torch's does."""


class Other(nn.ReLU):
    def forward(self, x):
        return super().forward(x).softmax(-1)


class Normed(nn.Sequential):
    """Does something between its layers."""

    def forward(self, x):
        return self[2](self[1](self[0](x)).softmax(-1))


def patched():
    module = nn.ReLU()
    module.forward = lambda x: x.softmax(-1)
    return module


class BasicBlock(nn.Module):
    """Has the layers of a ResNet's block."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)


def test_a_block_of_another_source_is_compared_with_the_whole_and_ours_is_not():
    own = chain(nn.Linear(4, 4), BasicBlock())
    assert is_to_be_checked(own, plan_of(own, ()))
    assert not is_to_be_checked(resnet18(), plan_of(resnet18(), ()))


def test_what_is_given_split_activations_is_found():
    model = chain(nn.Linear(4, 8), Same(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Tanh())
    assert list(between(model, plan_of(model, ()))) == ["1"]


@pytest.mark.parametrize(
    "model",
    [
        chain(nn.Linear(4, 4), Other(), nn.Linear(4, 4)),
        chain(nn.Linear(4, 4), patched(), nn.Linear(4, 4)),
        chain(Normed(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))),
        chain(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        chain(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4)),
        chain(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(4, 4)),
        chain(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1, groups=2)),
        chain(nn.Linear(4, 6), nn.BatchNorm1d(4), nn.Linear(6, 4)),
    ],
    ids=[
        "own forward",
        "patched forward",
        "chain of its own",
        "layer norm",
        "softmax",
        "flatten",
        "groups",
        "norm of another dim",
    ],
)
def test_layers_with_something_between_that_needs_all_features_are_no_pair(model):
    with pytest.raises(ConfigError, match="found nothing to split in Sequential"):
        plan_of(model, ())


def test_a_model_without_a_plan_is_told_what_would_work():
    with pytest.raises(ConfigError, match=r"tensor\.plan, such as .*fc1=column.* or use strategy 'fsdp' or 'ddp'"):
        plan_of(lstm(num_classes=3, in_features=4), ())


def test_the_pattern_of_the_hint_matches_in_the_model_itself_and_below():
    """``*.fc1`` matched nothing in a model that holds its layers itself."""
    block = nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)})
    hint = ("*.fc1=column", "*.fc2=row")
    assert plan_of(block, hint) == {"fc1": "column", "fc2": "row"}
    assert plan_of(nn.ModuleDict({"block": block}), hint) == {"block.fc1": "column", "block.fc2": "row"}


def test_a_given_plan_is_completed_in_a_chain():
    model = chain(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1))
    assert plan_of(model, ("0=column", "3=row")) == {
        "0": "column",
        "3": "row",
        "1": "channels",
        "2": "features",
    }


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (("fc=column",), r"no module matches 'fc'"),
        (("0=column",), r"and '1', a LayerNorm, needs all of them"),
        (("2=column",), r"no layer combines them with 'row'"),
    ],
)
def test_a_plan_that_leaves_an_activation_split_is_refused(plan, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_of(chain(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), plan)


@pytest.mark.parametrize(
    ("entry", "sentence"), [("fc1", "has the entry 'fc1'"), ("fc1=colum", "Did you mean 'column'")]
)
def test_an_entry_that_cannot_be_read_is_refused(entry, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TensorOptions(plan=(entry,))


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    model = perceptron(hidden=(12, 8, 18, 9), num_classes=5)
    sentence = r"cannot split the 18 heads, features or channels of '5' over 4 ranks\. Use 2 or 3 or 6 ranks"
    with pytest.raises(ConfigError, match=sentence):
        split(model, Ranks(4))


def test_sizes_without_a_common_divisor_are_refused():
    model = perceptron(hidden=(9, 8, 16), num_classes=5)
    with pytest.raises(ConfigError, match="No number of ranks divides all layers"):
        split(model, Ranks(2))


def test_a_tied_weight_is_not_split():
    model = chain(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="weight is tied to another layer"):
        split(model, Ranks(2))


def test_a_kind_that_does_not_fit_its_module_is_refused():
    model = chain(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="gives '1', a ReLU, the kind 'column'"):
        split(model, Ranks(2), {"1": "column"})
