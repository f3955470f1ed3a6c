"""Optimizers on parts of parameters: the bits of one device, or a refusal that names what the optimizer does."""

from functools import cache

import pytest
import torch
from tests.sameness.layouts import outcomes, require_ends
from tests.strategies.test_optimizer_trial import Coupled, Noisy, Normalized
from torch import nn, optim
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(300)
WIDTH = 37


class Bf16(nn.Sequential):
    """A model of bf16 parameters."""

    def forward(self, rows):
        return super().forward(rows.to(torch.bfloat16)).float()


def layers():
    """Sizes that no vector width divides; the blocks are gathered one by one."""
    return nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 53), nn.Tanh(), nn.Linear(53, 4)


def train(world, settings, make):
    """Three steps with clipping; the losses, norms, parameters and optimizer state."""
    torch.manual_seed(0)
    model, optimizer = make()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.arange(48) % 4)
    run = Run(RunOptions.of(global_batch=16, micro_batches=4, seed=3, threads=1, **settings), world)
    try:
        model, optimizer = run.prepare(model, optimizer)
        found = {}
        for batch in run.batches(data):
            found[f"loss {len(found)}"] = run.backward(batch, nn.CrossEntropyLoss())
            found[f"norm {len(found)}"] = run.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = run.require_prepared().state.capture(run.fingerprint(), keep=True)
        return {**found, **state.model, **state.optimizer}
    finally:
        run.close()


def fused(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, optim.AdamW(model.parameters(), lr=0.01, fused=True)

    return train(world, settings, make)


def narrow(world, settings):
    def make():
        model = Bf16(*layers()).to(torch.bfloat16)
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    return train(world, settings, make)


def factored(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, optim.Adafactor(model.parameters(), lr=0.01)

    return train(world, settings, make)


def orthogonal(world, settings):
    """Muon for the matrices, SGD for the rest."""

    def make():
        model = nn.Sequential(*layers())
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        return model, optim.Muon(matrices, lr=0.01)

    return train(world, settings, make)


def normalized(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, Normalized(model.parameters(), lr=0.1)

    return train(world, settings, make)


class Projected(optim.Optimizer):
    """Multiplies a gradient by vectors, whose products have other bits where memory begins elsewhere."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
                kept = self.state[parameter].setdefault("kept", torch.ones(rows.shape[1]))
                kept.add_(rows.T @ (rows @ kept))
                parameter.sub_(rows.mul(1 + (rows @ kept)[:, None]).view_as(parameter), alpha=0.1)


def projected(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, Projected(model.parameters(), lr=0.1)

    return train(world, settings, make)


def plain(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    return train(world, settings, make)


def noisy(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, Noisy(model.parameters(), lr=0.1)

    return train(world, settings, make)


def coupled(world, settings):
    def make():
        model = nn.Sequential(*layers())
        return model, Coupled(model.parameters(), lr=0.1)

    return train(world, settings, make)


PROGRAMS = (plain, fused, narrow, factored, orthogonal, normalized, projected, noisy, coupled)
DRAWS, OTHERS = "draws random numbers in its step", "updates a parameter by what it finds in others"
PLACE = "rounds an element with fused=True by its place"
WHOLE = "updates an element by others of its parameter"
UNCUT = {noisy: DRAWS, coupled: OTHERS}
"""Where parameters are whole, but not all in one process."""
NO_CHAIN = "the model is not a chain of modules"
CUT = {
    **UNCUT,
    fused: PLACE,
    narrow: "of torch.bfloat16 by its place",
    factored: "Adafactor",
    orthogonal: WHOLE,
    normalized: WHOLE,
    projected: WHOLE,
}
REFUSED = {
    "ddp": {},
    "dp": {},
    "layers": {narrow: NO_CHAIN},
    "fsdp": UNCUT,
    "fsdp-3": UNCUT,
    "server": {},
    "servers": UNCUT,
    "pipeline": {**UNCUT, narrow: NO_CHAIN},
    "data-pipeline": {**UNCUT, narrow: NO_CHAIN},
    "fsdp-pipeline": CUT,
}
"""The sentence that ends a program; all others have the bits of ``single``."""
SHORT = ("fsdp",)


@cache
def alone():
    return outcomes(PROGRAMS, "single")


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.slow] * (each not in SHORT)) for each in REFUSED]
)
def test_an_optimizer_steps_as_on_one_device_or_is_refused(layout):
    require_ends(PROGRAMS, alone(), outcomes(PROGRAMS, layout), layout, REFUSED[layout])
