"""Masks that belong to samples, whatever shares their forward pass; draws that would not are found."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError
from lockstep.strategies.fused_forward import MicroBatchKeys, RefuseDraws, key_dropouts

KEYS = {k: 1000 + k for k in range(8)}
SIZE = 3


def masked(model, keys, ks, shape):
    """The output for ones, by micro-batch, when these run together."""
    keys.begin([(SIZE, KEYS[k]) for k in ks])
    output = model(torch.ones(SIZE * len(ks), *shape))
    keys.end()
    return dict(zip(ks, output.split(SIZE)))


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Dropout, (40,)), (nn.Dropout1d, (40, 5)), (nn.Dropout2d, (40, 4, 3)), (nn.Dropout3d, (40, 2, 3, 2))],
)
def test_a_mask_is_the_same_whatever_shares_the_forward_pass(module, shape):
    model = nn.Sequential(module(0.4), module(0.2))
    keys = key_dropouts(model)
    together = masked(model, keys, [0, 1, 2, 3], shape)
    for ks in ([0], [1, 3], [3, 2], [0, 2, 3]):
        for k, output in masked(model, keys, ks, shape).items():
            assert torch.equal(output, together[k]), (ks, k)
    assert not torch.equal(together[0], together[1])
    kept = torch.stack(list(together.values()))
    assert abs(float((kept > 0).float().mean()) - 0.6 * 0.8) < 0.1
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / (0.6 * 0.8)))
    if len(shape) > 1:
        flat = kept.flatten(3)
        assert torch.equal(flat.amax(3), flat.amin(3)), "channels are dropped whole"


def test_calls_and_modules_draw_different_masks():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.first(x), self.first(x), self.second(x)], 1)

    model = Twice()
    output = masked(model, key_dropouts(model), [0], (50,))[0]
    assert len({tuple(part.flatten().tolist()) for part in output.unbind(1)}) == 3


def test_outside_of_a_step_and_in_evaluation_it_is_torchs_dropout():
    model = nn.Sequential(nn.Dropout(0.5))
    keys, x = key_dropouts(model), torch.ones(7, 20)
    torch.manual_seed(0)
    found = model(x)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(x, 0.5, training=True))
    keys.begin([(7, 1)])
    assert torch.equal(model.eval()(x), x)
    assert isinstance(model[0], nn.Dropout)


def test_a_probability_of_one_drops_all_and_of_zero_nothing():
    model = nn.Sequential(nn.Dropout(1.0), nn.Dropout(0.0))
    keys, x = key_dropouts(model), torch.ones(3, 4, requires_grad=True)
    keys.begin([(3, 1)])
    model[0](x).sum().backward()
    assert not x.grad.any() and torch.equal(model[1](x), x)


def test_activation_checkpointing_draws_the_same_mask_again():
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    keys = key_dropouts(layer)
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)):
        x = torch.ones(SIZE, 6, requires_grad=True)
        keys.begin([(SIZE, 5)])
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_module_called_twice_under_activation_checkpointing_is_refused():
    layer = nn.Dropout(0.5)
    keys = key_dropouts(layer)
    x = torch.ones(SIZE, 6, requires_grad=True)
    keys.begin([(SIZE, 5)])
    output = checkpoint(lambda x: layer(layer(x).sin()), x, use_reentrant=False)
    with pytest.raises(ConfigError, match=r"called 2 times in one forward pass.*Use a module for each"):
        output.sum().backward()


def test_a_tensor_whose_first_dimension_is_no_sample_is_refused():
    layer = nn.Sequential(nn.Dropout(0.5))
    keys = key_dropouts(layer)
    keys.begin([(2, 5), (2, 6)])
    with pytest.raises(ConfigError, match=r"'0' was given a tensor of shape \(6, 4\) .* 4 samples"):
        layer(torch.ones(6, 4))


def test_models_with_keyed_dropout_are_copied_and_stored():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    keys = key_dropouts(model)
    keys.begin([(2, 1)])
    model(torch.ones(2, 2))
    assert copy.deepcopy(model)[1].keys is keys
    assert not pickle.loads(pickle.dumps(model))[1].keys.is_active


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


@pytest.mark.parametrize(
    ("draw", "operator"),
    [
        (lambda x: F.dropout(x, 0.1), "dropout|bernoulli"),
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: x * torch.rand(x.shape[0], 1), "rand"),
        (lambda x: x[torch.randperm(len(x))], "randperm"),
        (lambda x: x.clone().bernoulli_(torch.full((6, 4), 0.5)), "bernoulli"),
        (F.gumbel_softmax, "exponential_"),
        (nn.AlphaDropout(0.1), "bernoulli"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (
            lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
            "dropout|attention|bernoulli",
        ),
        (lambda x: nn.LSTM(4, 4, 2, dropout=0.5)(x[None])[0], "dropout|uniform|bernoulli"),
    ],
)
def test_other_draws_are_found_with_their_line(draw, operator):
    x, module = torch.randn(6, 4), Draws(draw)
    with RefuseDraws(MicroBatchKeys()), pytest.raises(ConfigError) as caught:
        module(x)
    assert re.search(
        rf"aten\.\w*({operator})\w* in test_fused_forward_dropout\.py:\d+ would draw", str(caught.value)
    ), caught.value


@pytest.mark.parametrize(
    "silent",
    [
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: F.rrelu(x, training=False),
    ],
)
def test_operators_that_happen_not_to_draw_pass(silent):
    x = torch.randn(6, 4)
    expected = silent(x)
    with RefuseDraws(MicroBatchKeys()):
        assert torch.equal(silent(x), expected)
