"""The blocks of a model that are gathered together."""

from torch import nn

from lockstep.strategies.fsdp.exchange import large_blocks


def test_blocks_are_children_of_containers_that_share_no_parameter():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
    model.small = nn.Sequential(nn.Linear(4, 4))
    assert list(large_blocks(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    model.blocks[1].weight = model.blocks[0].weight
    assert list(large_blocks(model)) == ["blocks.2"]
