"""The cuts of a chain: even, at names, never between things that belong together."""

import functools
import textwrap
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models import perceptron, resnet18, transformer
from lockstep.strategies.pipeline import measured_split
from lockstep.strategies.pipeline.chain import chain
from lockstep.strategies.pipeline.partition import balanced, split


@functools.cache
def links_of_resnet18():
    return chain(resnet18())


def firsts(model, stages, points=()):
    return [part[0].name for part in split(chain(model), stages, points)][1:]


def heaviest(weights, starts):
    edges = [0, *starts, len(weights)]
    return max(sum(weights[a:b]) for a, b in pairwise(edges))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_cut_has_a_lighter_heaviest_stage(stages):
    generator = torch.Generator().manual_seed(stages)
    for _ in range(20):
        weights = torch.randint(0, 9, (7,), generator=generator).tolist()
        best = min(heaviest(weights, starts) for starts in combinations(range(1, 7), stages - 1))
        starts = balanced(weights, stages)
        assert len(starts) == stages - 1 and heaviest(weights, starts) == best


def test_an_activation_stays_with_the_layer_before_it():
    model = perceptron(in_features=8, hidden=(8, 8, 8), num_classes=8)
    assert firsts(model, 2) == ["5"] and type(model[5]) is nn.Linear


def test_every_link_is_in_one_stage():
    links = links_of_resnet18()
    for stages in (2, 3, 4, 8, len(links)):
        parts = split(links, stages)
        assert [link for part in parts for link in part] == links and all(parts)


def test_named_points_decide():
    assert firsts(resnet18(), 3, ["layer2", "layer4.1"]) == ["layer2.0", "layer4.1"]
    tokens = transformer(vocabulary_size=9, depth=3, width=8, heads=2)
    assert firsts(tokens, 2, ["blocks.2"]) == ["blocks.2"]


@pytest.mark.parametrize(
    "points, words",
    [
        (["layer2"], r"names 1 modules, and 3 stages need 2"),
        (
            ["layer2", "layer44"],
            r"'layer44', and the model cannot be cut there.*It can be cut before: bn1, relu",
        ),
        (["layer3", "layer2"], r"not in the order of the model"),
        (["conv1", "layer2"], r"not the first"),
        (["layer2", "layer2.0"], r"leaves a stage empty"),
    ],
)
def test_points_that_cannot_be_are_refused(points, words):
    with pytest.raises(ConfigError, match=words):
        split(links_of_resnet18(), 3, points)


def test_a_model_with_too_few_parts_is_refused():
    with pytest.raises(ConfigError, match=r"needs 3 stages, and the model is a chain of 2 modules: 0, 1.*fewer stages"):
        split(chain(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), 3)


def tied():
    """Six layers, of which the second and the fourth share their weight."""
    layers = [nn.Linear(4, 4) for _ in range(6)]
    layers[3].weight = layers[1].weight
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """A block as language models have them, which gives more than its output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.inner(x)), None


class Decoder(nn.Module):
    """As language models are written: a list of blocks between an embedding and a norm."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList(Residual() for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.norm(x)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.head = Decoder(), nn.Linear(4, 5)

    def forward(self, tokens):
        return self.head(self.decoder(tokens))


def test_a_model_with_a_list_of_blocks_is_refused_with_lines_that_make_a_chain_of_it():
    model, tokens = Language(), torch.arange(5)[None]
    with pytest.raises(ConfigError, match=r"Its 3 blocks \(Residual\) are in 'decoder.layers'") as refused:
        split(chain(model), 3)
    _, *lines = str(refused.value).splitlines()
    output, parameters = model(tokens), {*model.parameters()}
    exec(textwrap.dedent("\n".join(lines)), {"nn": nn, "model": model})
    assert torch.equal(model(tokens), output)
    assert {*model.parameters()} == parameters
    assert len(split(chain(model), 3)) == 3 and isinstance(model.decoder, nn.Sequential)


def test_tables_that_are_made_last_and_several_embeddings_are_for_the_first_block():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", torch.ones(2))

    model = Decoder()
    layers, norm = model._modules.pop("layers"), model._modules.pop("norm")
    model.positions, model.layers, model.norm, model.table = nn.Embedding(5, 4), layers, norm, Table()
    with pytest.raises(ConfigError) as refused:
        split(chain(nn.ModuleDict({"inner": model})), 2)
    said = str(refused.value)
    assert (
        "self.embed, self.positions, self.table = model.inner.embed, model.inner.positions, model.inner.table" in said
    )
    assert "return ...  # what the first Residual takes" in said and "return self.norm(x)" in said


def test_blocks_that_are_lists_themselves_are_not_called():
    """As ``for attention, perceptron in self.layers`` has them."""
    model = Decoder()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))
    with pytest.raises(ConfigError, match=r"x = \.\.\.  # calls what is in self\.block, a ModuleList, as"):
        split(chain(model), 2)


def test_a_weight_tied_across_a_named_cut_is_refused_with_a_cut_that_works():
    with pytest.raises(ConfigError, match=r"'3.weight' is also used in '1'.*stages 0 and 1.*Split at \['4'\]") as error:
        split(chain(tied()), 2, ["2"])
    assert "'4'" in str(error.value)
    assert firsts(tied(), 2, ["4"]) == ["4"]


def test_automatic_cuts_keep_tied_weights_together():
    for stages in (2, 3, 4):
        parts = split(chain(tied()), stages)
        holders = [n for n, part in enumerate(parts) for link in part if link.name in ("1", "3")]
        assert holders[0] == holders[1]


def test_a_model_tied_from_end_to_end_is_refused_in_one_sentence():
    model = transformer(vocabulary_size=9, depth=2, width=8, heads=2, tied=True)
    with pytest.raises(
        ConfigError, match=r"1 separable part: 'head.weight' is also used in 'embed.table'.*Untie it.*'ddp'"
    ):
        split(chain(model), 2)


def test_a_dropout_used_twice_stays_in_one_stage():
    """Its draws are keyed by how often it was called in the micro-batch."""
    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop, nn.Linear(4, 400))
    assert firsts(model, 2) == ["4"]
    with pytest.raises(ConfigError, match=r"'3' is also used in '1'"):
        split(chain(model), 2, ["2"])


def test_a_relu_used_twice_may_be_in_two_stages():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    assert firsts(model, 2) == ["2"]


class Clock:
    """Stands for the module ``time``; passes when a ``Costly`` runs."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Costly(nn.Module):
    """Takes so long, draws, and would change a buffer in training."""

    def __init__(self, clock, cost, width=3):
        super().__init__()
        self.clock, self.cost, self.norm = clock, cost, nn.BatchNorm1d(width)

    def forward(self, x):
        self.clock.now += self.cost
        return self.norm(x + torch.rand(x.shape[1]))


def test_measured_points_cut_where_the_time_is_and_leave_no_trace(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("lockstep.strategies.pipeline.partition.time", clock)
    model = nn.Sequential(*[Costly(clock, cost) for cost in (1, 1, 1, 7, 2, 2)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 3)
    numbers = torch.get_rng_state()
    assert measured_split(model, 2, x) == ("4",)
    assert measured_split(model, 3, x) == ("3", "4")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state()) and model.training
