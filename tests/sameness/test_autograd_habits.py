"""Models that use autograd in unusual ways, or give and take unusual things: the bits of one device, or a refusal."""

import collections
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.sameness.training import (
    DP,
    FSDP,
    PIPELINE,
    SERVERS,
    SHARDED_PIPELINE,
    SINGLE,
    TENSOR,
    WIDTH,
    Program,
    differing,
    under,
)
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.data import Dataset

from lockstep.errors import ConfigError

pytestmark = pytest.mark.timeout(240)


class Block(nn.Module):
    """A layer, and what the subclass does with it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x)


def between(*blocks):
    """A chain with these blocks between a first and a last layer."""
    return nn.Sequential(nn.Linear(6, WIDTH), *blocks, nn.Linear(WIDTH, 4))


def rounded(tensor):
    return tensor.dtype, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


class SavesRounded(Block):
    def forward(self, x):
        with saved_tensors_hooks(rounded, lambda packed: packed[1].to(packed[0])):
            return torch.tanh(self.layer(x))


class SavesOnCpu(Block):
    def forward(self, x):
        with save_on_cpu():
            return torch.tanh(self.layer(x))


def saved_tensors():
    return Program(between(SavesRounded(), nn.Tanh(), SavesOnCpu()))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Scale.apply(self.layer(x), self.scale)


def functions_of_autograd():
    return Program(between(Scaled(), nn.Tanh(), Scaled()))


class Checkpointed(Block):
    def __init__(self, early_stop=True, **options):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), self.layer)
        self.early_stop, self.options = early_stop, options

    def forward(self, x):
        with set_checkpoint_early_stop(self.early_stop):
            return checkpoint(self.inner, x, **self.options)


def checkpoints():
    kinds = (
        {"use_reentrant": False},
        {"use_reentrant": False, "early_stop": False},
        {"use_reentrant": True},
    )
    return Program(between(*(Checkpointed(**kind) for kind in kinds)))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    parametrizations.weight_norm(layers[0])
    parametrizations.orthogonal(layers[1])
    torch.nn.utils.parametrize.register_parametrization(layers[2], "weight", Symmetric())
    return Program(between(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]))


class Mapped(Block):
    def forward(self, x):
        shifted = torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (x,))
        return torch.func.vmap(lambda row: torch.tanh(self.layer(row)))(shifted)


def functional():
    return Program(between(Mapped(), nn.Tanh(), Mapped()))


class Differentiated(Block):
    """Adds the derivative of a layer, and of a loss by the layer's weight."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            output = torch.tanh(self.layer(inner))
            (slope,) = torch.autograd.grad(output.sum(), inner, create_graph=True)
            (by_weight,) = torch.autograd.grad(output.square().mean(), self.layer.weight, create_graph=True)
        return torch.tanh(self.layer(x)) + slope + by_weight.mean(0)


def derivatives_in_forward():
    return Program(between(Differentiated(), nn.Tanh(), Differentiated()))


class ByWeight(nn.Module):
    """Asks for the derivative by a block's weight from outside of the block."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        x = torch.tanh(self.first(x))
        loss = self.blocks[0](x).square().mean()
        (step,) = torch.autograd.grad(loss, (self.blocks[0].weight,), create_graph=True)
        return self.last(torch.tanh(self.blocks[0](x)) + step.mean(0))


def derivative_by_a_weight():
    return Program(ByWeight())


def penalty():
    """The gradient penalty of a GAN, by a forward of one's own."""
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(prepared):
        def both(data):
            inputs = data[0].detach().requires_grad_()
            output = prepared(inputs)
            return output, torch.autograd.grad(output.sum(), inputs, create_graph=True)[0]

        return both

    def loss(found, data):
        return F.cross_entropy(found[0], data[1]) + (found[1].norm(dim=1) - 1).square().mean()

    return Program(model, loss, forward=forward)


class InPlace(Block):
    def forward(self, x):
        y = self.layer(x.mul_(0.5).add_(1.0))
        y[:, :3] = 0.25
        return y.mul_(1.5)


class Halves(nn.Module):
    """Gives two views of one tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.layer(x).chunk(2, 1)


class Gated(Block):
    def forward(self, pair):
        return self.layer(pair[0] * torch.sigmoid(pair[1]))


class Unchanged(Block):
    def forward(self, x):
        return x


def views_and_changes_in_place():
    return Program(between(InPlace(), nn.ReLU(inplace=True), Halves(), Gated(), Unchanged(), InPlace()))


@dataclass
class Output:
    logits: Any
    mean: Any


Named = collections.namedtuple("Named", "logits mean")


class Gives(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, width), kind

    def forward(self, x):
        output = torch.tanh(self.layer(x))
        return self.kind(output, output.mean(1))


class Takes(Block):
    def forward(self, given):
        return self.layer(given.logits) + given.mean[:, None]


def loss_of_fields(output, target):
    return F.cross_entropy(output.logits, target) + output.mean.square().mean()


def named_tuples():
    model = nn.Sequential(nn.Linear(6, WIDTH), Gives(Named, WIDTH), Takes(), nn.Tanh(), Gives(Named, 4))
    return Program(model, loss_of_fields)


def dataclasses():
    ends = Gives(Output, WIDTH), Takes(), nn.Tanh(), Gives(Output, 4)
    return Program(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), Block(), *ends), loss_of_fields)


class Twice(Block):
    """Gives what it has as the input of the next block and as its residual."""

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        return Named(x, x)


class AddsTwice(Block):
    def forward(self, given):
        one, other = given
        sums = self.layer(one) + torch.sin(other) + torch.exp(one) * other.cos() + one.square() - other.tanh()
        return torch.tanh(sums)


def one_tensor_twice():
    return Program(between(Block(), Twice(), AddsTwice(), Block()))


class Lazily(nn.Module):
    """Gives its outputs one after the other, while the loss asks for them."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(6, WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield x[:, :4]


def generators():
    return Program(Lazily(), lambda outputs, target: sum(F.cross_entropy(each, target) for each in outputs))


class Records(Dataset):
    def __init__(self, record):
        self.rows, self.record = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), record

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.record(self.rows[index], index)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(6, WIDTH),
            nn.ModuleList([Block()]),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, *rows, scale=None, labels=None, **named):
        given = (*rows, *named.values())
        x = torch.tanh(sum(self.first(each) for each in given)) * (1.0 if scale is None else scale[:, None])
        output = self.last(torch.tanh(self.blocks[0](x=x)))
        return output if labels is None else {"loss": F.cross_entropy(output, labels)}


def many_arguments():
    return Program(ByKeyword(), data=Records(lambda row, index: (row, row.flip(0), 2 * row, index % 4)))


def keywords_only():
    data = Records(lambda row, index: {"x": row, "scale": torch.tensor(0.5 + index), "labels": index % 4})
    return Program(ByKeyword(), lambda output, data: output["loss"], data=data)


class WithoutGradient(Block):
    @torch.no_grad()
    def forward(self, x):
        return self.layer(x)


class InBf16(Block):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float()


def contexts():
    """Modules that are called under a context manager are called so also where the model is cut."""
    return Program(nn.Sequential(nn.Linear(6, WIDTH), InBf16(), nn.Tanh(), InBf16(), nn.Linear(WIDTH, 4)))


def without_gradient():
    return Program(between(nn.Tanh(), WithoutGradient(), nn.Tanh()))


class Detached(Block):
    """Takes a part of what it is given into the graph, and another part of it for its numbers only."""

    def forward(self, given):
        return torch.tanh(self.layer(given.logits.detach()) + given.mean[:, None])


class Complex(Block):
    def forward(self, x):
        return torch.complex(self.layer(x), x), x > 0, None


class Real(Block):
    def forward(self, given):
        waves, mask, _ = given
        return self.layer(torch.tanh(waves.real * waves.imag).where(mask, waves.abs()))


def many_types():
    return Program(between(Block(), Complex(), Real(), Block()))


def detached():
    return Program(between(Block(), Gives(Named, WIDTH), Detached(), Block()))


def tied():
    """A weight, a module, a buffer and a BatchNorm that are used at two places."""
    layer, norm, other = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = layer.weight
    return Program(between(layer, norm, nn.Tanh(), layer, norm, nn.Tanh(), other))


CHAINS = (
    saved_tensors,
    functions_of_autograd,
    checkpoints,
    parametrized,
    functional,
    derivatives_in_forward,
    views_and_changes_in_place,
    named_tuples,
    dataclasses,
    one_tensor_twice,
    contexts,
    without_gradient,
    detached,
    many_types,
    tied,
)
WHOLE = (
    derivative_by_a_weight,
    penalty,
    generators,
    many_arguments,
    keywords_only,
)
"""Programs whose model is no chain of modules, or cannot be cut."""


@cache
def alone():
    return under(SINGLE, *CHAINS, *WHOLE)


@pytest.mark.parametrize(
    "layout, makes",
    [
        pytest.param(
            DP, tuple(each for each in CHAINS + WHOLE if each is not penalty), id="dp", marks=pytest.mark.slow
        ),
        pytest.param(FSDP, CHAINS + WHOLE, id="fsdp", marks=pytest.mark.slow),
        pytest.param(PIPELINE, CHAINS, id="pipeline", marks=pytest.mark.slow),
        pytest.param(SERVERS, CHAINS + WHOLE, id="parameter_server", marks=pytest.mark.slow),
        pytest.param(SHARDED_PIPELINE, CHAINS, id="fsdp-pipeline", marks=pytest.mark.slow),
    ],
)
def test_unusual_models_have_the_bits_of_one_device(layout, makes):
    expected = {make.__name__: alone()[make.__name__] for make in makes}
    assert differing(expected, under(layout, *makes)) == {}


def policy(context, operator, *args, **kwargs):
    kept = operator == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpoints():
    options = {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(policy),
    }
    return Program(between(Checkpointed(**options), Checkpointed(**options)))


def derivative_by_all_weights():
    """A product with the Hessian, by a forward of one's own."""
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(prepared):
        def both(data):
            output = prepared(data[0])
            slopes = torch.autograd.grad(output.sum(), [*prepared.parameters()], create_graph=True)
            return output, sum(slope.square().sum() for slope in slopes)

        return both

    def loss(found, data):
        return F.cross_entropy(found[0], data[1]) + 1e-3 * found[1]

    return Program(model, loss, forward=forward)


@pytest.mark.slow
def test_what_is_differentiated_or_computed_again_outside_of_modules_has_the_bits_of_one_device():
    makes = (selective_checkpoints, derivative_by_all_weights)
    assert differing(under(SINGLE, *makes), under(FSDP, *makes)) == {}


def tangents():
    """A derivative in forward mode, by a forward of one's own."""

    def forward(prepared):
        return lambda data: torch.func.jvp(prepared, (data[0],), (torch.ones_like(data[0]),))

    return Program(
        between(nn.Tanh()), lambda found, data: F.cross_entropy(found[0] + found[1], data[1]), forward=forward
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own, in forward mode
def test_a_derivative_in_forward_mode_has_the_bits_of_one_device():
    """Under fsdp it was refused in a forward of one's own, and ended in an error of torch in the loop."""
    assert differing(under(SINGLE, tangents), under(FSDP, tangents)) == {}


class ByTransform(Block):
    def forward(self, x):
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.layer(row)).sum()))(x)
        return self.layer(x) + slope


def transforms():
    return Program(between(ByTransform()))


@pytest.mark.parametrize(
    "layout, make, said",
    [
        (FSDP, transforms, r"calls torch.func.grad.*Use torch.autograd.grad.*'ddp'"),
        (PIPELINE, penalty, r"a forward of your own"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_cut_or_sharded_is_refused(layout, make, said):
    with pytest.raises(ConfigError, match=said):
        under(layout, make)


def test_a_second_derivative_goes_through_split_layers():
    """Level B: within the bound of rounding. The collectives of the first derivative had none of their own."""
    found, expected = (each["penalty"]["losses"] for each in (under(TENSOR, penalty), alone()))
    assert found == pytest.approx(expected, rel=1e-5) and len({*expected}) == 3
