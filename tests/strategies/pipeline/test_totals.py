"""Losses and gradients of one stage in one process."""

import torch
from torch import nn

from lockstep.core.plan import Share
from lockstep.strategies.pipeline.totals import Losses, Totals

CPU = torch.device("cpu")


def test_losses_and_weights_come_back_in_order():
    losses = Losses(Share(), 4, CPU, [], is_last=True)
    losses.begin(3)
    for place in range(3):
        losses.put(place, torch.tensor(place + 1.0), torch.tensor(2.0))
    found, weight = losses.of_all(losses.told().unsqueeze(0), 3)
    assert found.tolist() == [1.0, 2.0, 3.0]
    assert float(weight) == 6.0


def test_gradients_are_the_mean_over_the_micro_batches():
    stage = nn.Linear(2, 1, bias=False)
    totals = Totals(stage, None, Share(), 2, (), CPU, 4)
    totals.begin(range(2), 2)
    for k, x in enumerate((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]]))):
        totals.begin_forward()
        loss = stage(x).sum()
        totals.end_forward(k)
        loss.backward()
        totals.end_backward()
    assert totals.reduce(torch.zeros(4, dtype=torch.float64)).shape == (1, 4)
    totals.finish(torch.tensor(2.0))
    assert stage.weight.grad.tolist() == [[2.0, 4.0]]
