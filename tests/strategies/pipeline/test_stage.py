"""A stage in one process: names of the whole model, and an output whose backward is refused."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.chain import chain
from lockstep.strategies.pipeline.stage import (
    Neighbours,
    Passes,
    Stage,
    refusing_backward,
    uses_of_links,
)


def test_a_stage_runs_its_links_and_keeps_the_names_of_the_whole_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    stage = Stage(chain(model)[1:], model)
    assert [name for name, _ in stage.named_parameters()] == ["1.1.weight", "1.1.bias"]
    x = torch.randn(5, 4)
    assert torch.equal(stage(x), model[1](x))


class Decoder(nn.Module):
    """Made in another order than it runs in; the first and the last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.head, self.norm, self.body = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.body.weight = self.head.weight

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def test_a_shared_parameter_has_the_name_that_it_has_in_the_model_whichever_module_runs_first():
    """Under another name its gradient was lost."""
    model = Decoder()
    stage = Stage(chain(model), model)
    assert [*stage.state_dict()] == [*model.state_dict()]
    assert [name for name, _ in stage.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_backward_of_a_pipelined_output_is_refused_with_what_to_call():
    weight = nn.Parameter(torch.ones(1))
    output = refusing_backward({"logits": torch.ones(2, 3)}, parameters=[weight])["logits"]
    assert torch.equal(output, torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"Call run\.backward\(batch, loss_fn\)"):
        output.sum().backward()
    with torch.no_grad():
        assert not refusing_backward(torch.ones(2), parameters=[weight]).requires_grad
    assert not refusing_backward(torch.ones(2), parameters=[weight.detach()]).requires_grad


def test_the_gradient_of_a_pipelined_output_by_an_input_or_a_parameter_is_refused():
    """With ``allow_unused`` it was None, and without it an error of torch."""
    x = torch.ones(2, 3, requires_grad=True)
    output = refusing_backward(torch.ones(2, 3), {"pixels": [x]})
    with pytest.raises(ConfigError, match=r"torch\.autograd\.grad was called on the output"):
        torch.autograd.grad(output.sum(), x, allow_unused=True)
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"torch\.autograd\.grad was called on the output"):
        torch.autograd.grad(refusing_backward(torch.ones(2), parameters=[weight]).sum(), weight, allow_unused=True)


def test_a_stage_without_neighbours_is_the_last_one():
    model = nn.Sequential(nn.Linear(3, 4))
    stage = Stage(chain(model), model)
    assert Passes(stage, Neighbours(), "0", {}).is_last


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_channels_are_opened_in_an_order_in_which_no_two_ranks_wait_for_each_other(length):
    """As NCCL does: a first use blocks a rank until the other rank of the pair is at the same one."""
    uses = list(uses_of_links(length, around=True))
    queues = [[use for use in uses if place in use[1:]] for place in range(length)]
    opened = []
    while any(queues):
        ready = [use for use in uses if all(queues[place][:1] == [use] for place in use[1:])]
        assert ready, f"every rank waits: {queues}"
        opened.append(ready[0])
        for place in ready[0][1:]:
            queues[place].pop(0)
    on, back, answer = range(3)
    pairs = [(place, (place + 1) % length) for place in range(length)] if length > 1 else []
    last = [(length - 1, place) for place in range(length - 1)]
    expected = {on: pairs, back: [pair[::-1] for pair in pairs], answer: last}
    assert sorted(opened) == sorted((tag, *pair) for tag, own in expected.items() for pair in own)
