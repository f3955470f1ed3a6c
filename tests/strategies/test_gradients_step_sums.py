"""Losses, gradients and running statistics of a step in one process."""

import torch
from torch import nn

from lockstep.core.plan import Share
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.gradients import StepSums

CPU = torch.device("cpu")


def test_gradients_are_the_mean_over_the_micro_batches():
    stage = nn.Linear(2, 1, bias=False)
    sums = StepSums(dict(stage.named_parameters()), RunningBuffers(stage), None, Share(), 2, CPU)
    sums.begin(range(2), 2)
    for k, x in enumerate((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]]))):
        sums.begin_forward()
        loss = stage(x).sum()
        sums.end_forward(k)
        loss.backward()
        sums.tree.end_micro_batch()
    result = sums.reduce([torch.tensor(1.0), torch.tensor(4.0)], [torch.tensor(1.0)] * 2, 3)
    assert stage.weight.grad.tolist() == [[2.0, 4.0]]
    assert (result.losses.tolist(), float(result.loss), int(result.stop)) == ([1.0, 4.0], 2.5, 3)
    assert bool(result.finite)


def test_running_statistics_are_the_mean_of_what_each_micro_batch_left():
    norm = nn.BatchNorm1d(1, momentum=1.0)
    sums = StepSums({}, RunningBuffers(norm), None, Share(), 2, CPU)
    sums.begin(range(2), 2)
    for k, first in enumerate((0.0, 4.0)):
        sums.begin_forward()
        norm(torch.tensor([[first], [first + 2.0]]))
        sums.end_forward(k)
        sums.tree.end_micro_batch()
    sums.reduce([torch.tensor(1.0)] * 2, [torch.tensor(1.0)] * 2, 0)
    assert norm.running_mean.tolist() == [3.0]
    assert int(norm.num_batches_tracked) == 1
