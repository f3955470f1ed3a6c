"""Activations whose shards are tensors of their own."""

import pytest
import torch
from tests.run.jobs import begin
from torch import nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.strategies.tensor.layers import ShardedActivation, join_shards, split_shards


def shards(count=3, shape=(2, 4)):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(
    "function",
    [
        nn.GELU(),
        lambda x: F.relu(x) + 1,
        lambda x: (2 * x).view(4, 2).t(),
        lambda x: x.unflatten(-1, (2, -1)).permute(1, 0, 2).unbind()[1],
        lambda x: x.clone().mul_(3).add(x),
        lambda x: torch.cat([x, x.softmax(-1)], 0),
        lambda x: x.chunk(2, 1)[0].max(1).values,
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda x: x * torch.ones(x.shape[-1]),
    ],
)
def test_a_function_sees_one_shard_after_the_other(function):
    parts = shards()
    expected = [function(part) for part in parts]
    found = split_shards(function(join_shards(parts)))
    assert len(found) == len(parts)
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    sum(part.sum() for part in found).backward()
    assert all(part.grad is not None for part in parts)


def test_a_single_shard_is_what_it_is():
    (part,) = shards(1)
    assert join_shards([part]) is part and split_shards(part) == [part]


def test_its_shape_and_type_are_those_of_a_shard():
    whole = join_shards(shards(shape=(2, 5)))
    assert isinstance(whole, ShardedActivation)
    assert whole.shape == (2, 5) and whole.dtype == torch.float32 and whole.dim() == 2


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.sum().item(), "item was called .* gives another value for each shard"),
        (lambda x: bool((x > 0).all()) or bool(x[0, 0] > 0), "gives another value for each shard"),
        (Own.apply, "or in another way that it cannot run on each shard"),
    ],
)
def test_what_needs_the_whole_activation_is_refused(function, said):
    with pytest.raises(ConfigError, match=said):
        function(join_shards(shards()))


def test_an_optimizer_that_rounds_by_place_is_refused_with_shards_alone():
    """On each number of ranks it steps other parts; without shards the bits are not promised."""

    def begin_in(shards):
        begin(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
            strategy="single",
            tensor={"shards": shards},
            make_optimizer=lambda params, **_: torch.optim.AdamW(params, fused=True),
        )

    begin_in(0)
    with pytest.raises(ConfigError, match=r"AdamW rounds an element with fused=True.* 'ddp' without tensor\.shards"):
        begin_in(2)
