"""The part of a layer that a rank holds."""

import pytest
import torch
from tests.strategies.tensor.test_plans import Ranks, split
from torch import nn

from lockstep.models import transformer
from lockstep.strategies.tensor.layers import ShardSpec


def test_what_a_rank_holds_is_its_part():
    model = transformer(vocabulary_size=9, width=12, depth=1, heads=6, dropout=0.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wholes = dict(model.named_parameters())
    cuts = split(model, Ranks(3, 1))
    after = dict(model.named_parameters())
    assert list(after) == list(wholes), "names and their order stay"
    assert all(after[name] is wholes[name] for name in wholes), "and the objects"
    assert [each.shape for each in after.values()] == [before[name].shape for name in after], "and shapes"
    held = {name: each.parameter_rows if name in cuts else each for name, each in after.items()}
    attention = "blocks.0.attention.1"
    query = before[f"{attention}.inputs.weight"].view(3, 6, 2, 12)[:, 2:4].reshape(12, 12)
    assert torch.equal(held[f"{attention}.inputs.weight"], query)
    assert torch.equal(held[f"{attention}.output.weight"], before[f"{attention}.output.weight"][:, 4:8])
    assert torch.equal(held["blocks.0.perceptron.1.bias"], before["blocks.0.perceptron.1.bias"][16:32])
    assert torch.equal(held["blocks.0.perceptron.3.bias"], before["blocks.0.perceptron.3.bias"])
    whole = [name for name in held if name not in cuts]
    assert all(torch.equal(held[name], before[name]) for name in whole)


def test_a_model_whose_named_parameters_takes_no_remove_duplicate_is_split():
    class Own(nn.Sequential):
        def named_parameters(self, prefix="", recurse=True):
            return super().named_parameters(prefix, recurse)

    cuts = [split(kind(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 12)), Ranks(3, 1)) for kind in (nn.Sequential, Own)]
    assert list(cuts[0]) == list(cuts[1]) != []


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_make_the_whole(dim, blocks, ranks):
    whole = torch.arange(18 * 36 * 2).view(18, 36, 2)
    parts = torch.stack([ShardSpec(dim, ranks, rank, blocks).local_shard(whole) for rank in range(ranks)])
    assert parts[0].shape[dim] == whole.shape[dim] // ranks
    assert torch.equal(ShardSpec(dim, ranks, 0, blocks).join(parts), whole)
