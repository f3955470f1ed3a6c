"""State that user code keeps between forward passes: refused by name on every rank, or without effect on any bit."""

import logging
import random
from random import gauss

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.errors import LockstepError
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

GLOBAL = {"calls": 0}


def model_with(odd):
    """A sequence of three, so that every strategy can cut it; ``odd`` is in the middle."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), odd, nn.Linear(32, 4))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Alternates(Counts):
    def forward(self, x):
        self.calls += 1
        return x if self.calls % 2 else 2 * x


class Recurs(nn.Module):
    """A hidden state between batches."""

    memory = None

    def forward(self, x):
        out = x if self.memory is None else x + self.memory
        self.memory = x.mean(0).detach()
        return out


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class OwnNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return x * float(self.rng.random()) if self.rng.random() < 0.5 else x


class InDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.store = {"scale": torch.ones(1)}

    def forward(self, x):
        self.store["scale"] *= 0.9
        return x * self.store["scale"]


class InGlobal(nn.Module):
    def forward(self, x):
        GLOBAL["calls"] += 1
        return x * GLOBAL["calls"]


class InClass(nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * type(self).calls


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-5, 5)
        return self.inner(x)


class ClampsData(Clamps):
    def forward(self, x):
        self.inner.weight.data.clamp_(-0.05, 0.05)
        return self.inner(x)


class InitialisesItself(nn.Module):
    """ActNorm: scale and bias from the first batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias, self.ready = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32)), False

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
            self.ready = True
        return (x + self.bias) * self.scale


class PlainList(nn.Module):
    """Layers in a list, which torch does not register."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(32, 32)]

    def forward(self, x):
        return self.layers[0](x)


def loss_that_counts():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) * calls

    return loss


class SmoothedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.tensor(1.0)

    def forward(self, output, target):
        loss = F.cross_entropy(output, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def loss_with_batch_norm():
    head = nn.BatchNorm1d(4, affine=False)
    return lambda output, target: F.cross_entropy(head(output), target)


def loss_with_layer():
    head = nn.Linear(4, 4)
    return lambda output, target: F.cross_entropy(head(output), target)


REFUSED = {
    "counter": (Counts, None, "the attribute 'calls' of 1"),
    "parity": (Alternates, None, "the attribute 'calls' of 1"),
    "recurrent": (Recurs, None, "the attribute 'memory' of 1"),
    "torch generator": (OwnGenerator, None, "the attribute 'generator' of 1"),
    "numpy generator": (OwnNumpy, None, "the attribute 'rng' of 1"),
    "dictionary": (InDictionary, None, "the attribute 'store' of 1['scale']"),
    "global": (InGlobal, None, "the global variable 'GLOBAL'['calls']"),
    "class attribute": (InClass, None, "the class attribute 'calls' of InClass"),
    "counter of the loss": (nn.Identity, loss_that_counts, "the variable 'calls' of the loss"),
    "state of the loss": (nn.Identity, SmoothedLoss, "the attribute 'mean' of the loss SmoothedLoss"),
    "BatchNorm of the loss": (nn.Identity, loss_with_batch_norm, "running statistics"),
    "layer of the loss": (nn.Identity, loss_with_layer, "parameters that require gradients (weight)"),
    "layers in a list": (PlainList, None, "parameters that require gradients (weight)"),
    "clamp_": (Clamps, None, "writes into the parameter '1.inner.weight'"),
    "clamp_ of .data": (ClampsData, None, "writes into the parameter '1.inner.weight'"),
    "ActNorm": (InitialisesItself, None, "writes into the parameter '1."),
}


class KeepsLast(nn.Module):
    """Notes that are written before they are read."""

    def forward(self, x):
        self.attention = torch.softmax(x, 1)
        self.notes = {"mean": x.mean()}
        if not hasattr(self, "mask"):
            self.mask = torch.ones(x.shape[1])
        return x * self.attention * self.mask


class DrawsNumpy(nn.Module):
    def forward(self, x):
        return x * float(np.random.rand()) + random.random() + gauss(0, 1)


def loss_with_notes():
    seen = []

    def loss(output, target):
        seen.append(float(output.mean()))
        weight = 1 + np.random.rand()
        return weight * F.cross_entropy(output, target)

    return loss


def loss_with_teacher():
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
    return lambda output, target: F.cross_entropy(output, target) + F.mse_loss(output, teacher(output))


def loss_with_penalty():
    def loss(output, target):
        value = F.cross_entropy(output, target)
        (gradient,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return value + gradient.square().mean()

    return loss


class WritesInput(nn.Module):
    def forward(self, x):
        return x.clone().add_(1)


EQUAL = {
    "last attention": (KeepsLast, None),
    "numpy and random in the model": (DrawsNumpy, None),
    "numpy in the loss": (nn.Identity, loss_with_notes),
    "frozen teacher": (nn.Identity, loss_with_teacher),
    "gradient penalty": (nn.Dropout, loss_with_penalty),
    "in-place input": (WritesInput, None),
}


def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))


def train(world, odd, make_loss, **options):
    """Trains two steps; the digests of the model, and its loss."""
    loss = F.cross_entropy if make_loss is None else make_loss()
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, fingerprint_every=0, threads=1, **options), world)
    model = model_with(odd())
    try:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for batch in run.batches(data()):
            losses.append(float(run.backward(batch, loss)).hex())
            optimizer.step()
            optimizer.zero_grad()
        return run.fingerprint(), losses
    finally:
        run.close()


def all_cases(world, names, options):
    """The outcome of each case on this rank, by name: digests, or a refusal."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    cases, found = {**{n: c[:2] for n, c in REFUSED.items()}, **EQUAL}, {}
    for name in names:
        try:
            found[name] = train(world, *cases[name], **options)
        except LockstepError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


LAYOUTS = [
    ("fsdp", 2, {"strategy": "fsdp"}),
]
MORE = [
    ("pipeline", 2, {"strategy": "pipeline"}),
    ("ddp", 2, {"strategy": "ddp"}),
    ("parameter_server", 2, {"strategy": "parameter_server"}),
    ("dp", 1, {"strategy": "dp"}),
    ("layers", 1, {"strategy": "layers"}),
    ("ddp-3", 3, {"strategy": "ddp"}),
    ("fsdp-3", 3, {"strategy": "fsdp"}),
    ("fsdp-pipeline", 4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"}),
    ("data-pipeline", 4, {"strategy": "hybrid", "mesh": "data=2,pipeline=2"}),
]


@pytest.fixture(scope="module")
def alone():
    """The outcomes on one process, in order."""
    return run_ranks(all_cases, 1, [*REFUSED, *EQUAL], {"strategy": "single"}, timeout=120)[0]


def test_one_process_refuses_hidden_state_by_name(alone):
    for name, (_, _, words) in REFUSED.items():
        assert str(alone[name]).startswith("ConfigError"), f"{name}: {alone[name]}"
        assert words in alone[name], f"{name}: {alone[name]}"
    for name in EQUAL:
        assert isinstance(alone[name], tuple), f"{name}: {alone[name]}"


@pytest.mark.parametrize(
    ("layout", "world", "options"),
    [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
    ids=[name for name, *_ in [*LAYOUTS, *MORE]],
)
def test_layouts_refuse_the_same_and_have_the_same_bits(alone, layout, world, options):
    everyone = run_ranks(all_cases, world, [*REFUSED, *EQUAL], options, timeout=120)
    for name, (_, _, words) in REFUSED.items():
        assert all(each[name] == everyone[0][name] for each in everyone), f"{name}: {everyone}"
        assert words in str(everyone[0][name]), f"{name}: {everyone[0][name]}"
    for name in EQUAL:
        assert all(each[name] == alone[name] for each in everyone), f"{name}: {everyone}"
