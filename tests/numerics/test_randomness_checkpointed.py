"""Random numbers of a model whose blocks run twice, because their activations were not kept."""

import pytest
import torch
from tests.numerics.test_randomness import CPU, ONES, same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lockstep.errors import ConfigError
from lockstep.models import transformer
from lockstep.numerics.randomness import KeyedRandomness


def gradients(model, x, k=1):
    """The gradients of one micro-batch, with the model's own keys."""
    randomness = KeyedRandomness(model, 0, CPU)
    randomness.begin_micro_batch(0, k)
    output = model(x)
    randomness.begin_loss()
    output.square().sum().backward()
    randomness.end_step(0)
    randomness.remove()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


class Checkpointed(nn.Module):
    """Runs a function of its own with activation checkpointing, or without."""

    def __init__(self, run, *blocks, **options):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run, self.options = run, options
        self.on = True

    def forward(self, x):
        if self.on:
            return self.run(self.blocks, x, lambda f, value: checkpoint(f, value, use_reentrant=False, **self.options))
        return self.run(self.blocks, x, lambda f, value: f(value))


def each_block(blocks, x, save):
    for block in blocks:
        x = save(block, x)
    return x


def one_block_three_times(blocks, x, save):
    for _ in range(3):
        x = save(blocks[0], x)
    return x


def own_draws_around_a_block(blocks, x, save):
    def around(value):
        return F.dropout(blocks[0](F.dropout(value, 0.3)), 0.5)

    return F.dropout(save(around, save(around, x)), 0.2)


def two_blocks_in_one(blocks, x, save):
    return save(lambda value: blocks[1](F.dropout(blocks[0](value), 0.5)), F.dropout(x, 0.5))


def nested(blocks, x, save):
    return save(lambda value: save(blocks[1], F.dropout(save(blocks[0], value), 0.4)), x)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)))


@pytest.mark.parametrize(
    "run", [each_block, one_block_three_times, own_draws_around_a_block, two_blocks_in_one, nested]
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(run, early_stop):
    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed(run, block(), block()), nn.Dropout(0.1), nn.Linear(8, 2))
    x = torch.randn(32, 8)
    for k in range(2):
        model[0].on = False
        plain = gradients(model, x, k)
        model[0].on = True
        with set_checkpoint_early_stop(early_stop):
            assert same(gradients(model, x, k), plain)


def test_a_transformer_s_blocks_may_be_checkpointed():
    torch.manual_seed(0)
    model = transformer(vocabulary_size=11, width=8, heads=2, depth=3, dropout=0.3)
    tokens = torch.randint(11, (4, 6))
    plain = gradients(model, tokens)
    model.blocks = nn.Sequential(Checkpointed(each_block, *model.blocks))
    renamed = gradients(model, tokens)
    model.blocks[0].on = False
    assert same(renamed, gradients(model, tokens))
    assert not same(renamed, plain), "the blocks' names are part of the key"


def test_a_unit_called_twice_without_a_preserved_generator_is_refused():
    model = Checkpointed(one_block_three_times, block(), preserve_rng_state=False)
    with pytest.raises(ConfigError, match=r"blocks.0\S* draws .* called several times .* preserve_rng_state=True"):
        gradients(model, ONES)


@pytest.mark.parametrize("drawn", [0.0, 0.5])
def test_a_unit_called_twice_may_be_recomputed_by_a_function_of_its_own_if_it_draws_nothing(drawn):
    """As the adjoint of torchdiffeq does."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, layer, x, *parameters):
            ctx.layer, ctx.x = layer, x
            return layer(layer(x))

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                output = ctx.layer(ctx.layer(ctx.x))
            return None, None, *torch.autograd.grad(output, list(ctx.layer.parameters()), gradient)

    class Solver(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(drawn), nn.Tanh())

        def forward(self, x):
            return Twice.apply(self.layer, x, *self.layer.parameters()) if self.fast else self.layer(self.layer(x))

    model = Solver()
    model.fast = False
    plain = gradients(model, ONES)
    model.fast = True
    if drawn:
        with pytest.raises(ConfigError, match="draws random numbers, was called several times"):
            gradients(model, ONES)
    else:
        assert same(gradients(model, ONES), plain)


def test_a_unit_called_once_may_be_checkpointed_without_preserving_the_generator():
    torch.manual_seed(0)
    model = Checkpointed(each_block, block(), block(), preserve_rng_state=False)
    first = gradients(model, ONES)
    model.on = False
    assert same(gradients(model, ONES), first)
