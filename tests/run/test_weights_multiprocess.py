"""Weights that the run gives and takes, on two ranks."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

DATA = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3)


class Tied(nn.Sequential):
    """Has one weight under two names, and buffers."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
        self[3].weight = self[0].weight


def train(world, strategy, tied):
    """Trains two epochs; gives the weights after each, as they are at the end, and what is said of wrong ones."""
    options = {"global_batch": 8, "micro_batches": 2, "seed": 3, "strategy": strategy, "timeout": 60.0}
    run = Run(RunOptions.of(**options), world)
    torch.manual_seed(0)
    model = Tied()
    if not tied:
        model[3] = nn.Linear(6, 6)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    taken = []
    for _ in run.epochs(2):
        for batch in run.batches(DATA):
            run.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        taken.append(run.state_dict())
    run.load_state_dict(taken[0])
    taken.append(run.state_dict())
    said = []
    for change in ({"0.bias": None}, {"more": torch.ones(1)}, {"0.bias": torch.ones(7)}, {"0.bias": 3}):
        weights = {name: each for name, each in {**taken[0], **change}.items() if each is not None}
        with pytest.raises(ConfigError) as caught:
            run.load_state_dict(weights if run.is_main else {})
        said.append(str(caught.value))
    run.close()
    return taken, said


@pytest.mark.parametrize(
    ("strategy", "world", "tied"),
    [
        ("single", 1, True),
        ("ddp", 2, True),
        ("fsdp", 2, False),
        ("pipeline", 2, False),
        pytest.param("parameter_server", 2, True, marks=pytest.mark.slow),
    ],
)
def test_weights_are_copies_that_can_be_set_again_under_every_strategy(strategy, world, tied):
    """The best epoch's weights were those of the last one, except under fsdp and pipeline."""
    (taken, said), *others = run_ranks(train, world, strategy, tied)
    first, second, again = taken
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not tied or first["0.weight"] is first["3.weight"]
    expected = [
        "missing (1): 0.bias",
        "unexpected (1): more",
        "[7] instead of [6]",
        "no dense tensors with values (1): 0.bias",
    ]
    for each, words in zip(said, expected, strict=True):
        assert words in each
    for given, refused in others:
        assert given == [{}, {}, {}]
        assert refused == said
