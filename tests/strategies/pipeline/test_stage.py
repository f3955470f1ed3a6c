"""A stage in one process: names of the whole model, and an output whose backward is refused."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.chain import chain
from lockstep.strategies.pipeline.stage import Neighbours, Passes, Stage, refusing_backward


def test_a_stage_runs_its_links_and_keeps_the_names_of_the_whole_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    stage = Stage(chain(model)[1:])
    assert [name for name, _ in stage.named_parameters()] == ["1.1.weight", "1.1.bias"]
    x = torch.randn(5, 4)
    assert torch.equal(stage(x), model[1](x))


def test_backward_of_a_pipelined_output_is_refused_with_what_to_call():
    output = refusing_backward({"logits": torch.ones(2, 3)})["logits"]
    assert torch.equal(output, torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"Call run\.backward\(batch, loss_fn\)"):
        output.sum().backward()
    with torch.no_grad():
        assert not refusing_backward(torch.ones(2)).requires_grad


def test_a_stage_without_neighbours_is_the_last_one():
    stage = Stage(chain(nn.Sequential(nn.Linear(3, 4))))
    assert Passes(stage, Neighbours(), "0").is_last
