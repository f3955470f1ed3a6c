"""Timing a run changes nothing of it."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.scale.rank import StepObserver

STEPS = 4


def body(world, observed):
    """Parameters after some steps, and the phases of each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(96, 12), torch.randint(0, 4, (96,)))
    run = lockstep.init(global_batch=24, micro_batches=4, seed=3, strategy="ddp")
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    observer = StepObserver(run) if observed else None
    for batch in run.batches(data):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
        if observer is not None:
            observer.end_step()
    state = {name: tensor.clone() for name, tensor in run.state_dict().items()}
    run.close()
    return state, observer.clock.steps if observer is not None else []


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_observed_run_has_the_same_bits_and_every_phase_of_every_step(ranks):
    plain = run_ranks(body, ranks, False)
    timed = run_ranks(body, ranks, True)
    for (expected, _), (state, steps) in zip(plain, timed):
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(tensor, state[name]), name
        assert len(steps) == STEPS
        for step in steps:
            assert {"data", "forward", "backward", "exchange", "optimizer"} <= set(step)
            assert all(seconds >= 0.0 for seconds in step.values())
