import pytest
import torch
from torch import nn

from lockstep.checkpoint import CheckpointState


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, with a buffer beside it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.never_used = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (5,), generator=draw)
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def filled(step, size=200):
    """A state that shows its step in every tensor, so that a mixture of two would be seen."""
    return CheckpointState(
        model={"a.weight": torch.full((size,), float(step)), "a.count": torch.tensor(step)},
        optimizer={"main|a.weight|momentum_buffer": torch.full((size,), -float(step))},
        progress={"step": step},
    )


def step_shown(state):
    """The step of a filled state; fails for a mixture."""
    found = {int(v) for v in state.model["a.weight"].unique()} | {int(state.model["a.count"])}
    found |= {-int(v) for v in state.optimizer["main|a.weight|momentum_buffer"].unique()}
    found.add(state.progress["step"])
    assert len(found) == 1, f"a mixture of the steps {found}"
    return found.pop()


@pytest.fixture
def tied():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def training():
    return train


@pytest.fixture
def state_of():
    return filled


@pytest.fixture
def shown():
    return step_shown
