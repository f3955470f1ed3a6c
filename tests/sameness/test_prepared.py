"""Loops that look at the prepared model, its parameters, gradients and groups: the bits of one device, or a refusal."""

import copy
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import LAYOUTS, outcomes, require_ends
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(400)
WIDTH = 37
NOTHING = torch.zeros(())


def layers():
    return nn.Sequential(
        nn.Linear(6, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 53),
        nn.Tanh(),
        nn.Linear(53, 4),
    )


def frozen_ends():
    model = layers()
    model[0].requires_grad_(False)
    model[7].requires_grad_(False)
    return model


class Loop:
    """A training of three steps with things done in between; a subclass says which."""

    make = staticmethod(layers)

    def __init__(self):
        self.found = {}

    def optimizer(self, model):
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def prepared(self):
        """Called once, after ``run.prepare``."""

    def begin(self, step):
        """Called before ``run.backward``."""

    def reduced(self, step):
        """Called before ``optimizer.step``."""

    def stepped(self, step):
        """Called after it."""

    def train(self, world, settings):
        torch.manual_seed(0)
        own = self.make()
        optimizer = self.optimizer(own)
        options = {"global_batch": 16, "micro_batches": 4, "seed": 3, "threads": 1, "fingerprint_every": 1}
        run = Run(RunOptions.of(**{**options, **settings}), world)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(48, 6, generator=generator), torch.arange(48) % 4)
        try:
            self.model, self.optimizer = run.prepare(own, optimizer)
            self.prepared()
            for _ in run.epochs(1):
                for step, batch in enumerate(run.batches(data)):
                    self.begin(step)
                    self.found[f"loss {step}"] = run.backward(batch, self.loss)
                    self.reduced(step)
                    self.optimizer.step()
                    self.stepped(step)
                    self.optimizer.zero_grad()
            state = run.require_prepared().state.capture(run.fingerprint(), keep=True)
            return {**self.found, **state.model, **state.optimizer}
        finally:
            run.close()

    @property
    def parameters(self):
        return list(self.model.parameters())

    @property
    def grouped(self):
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class Named(Loop):
    """Names, shapes, counts and modes are the user's own."""

    def reduced(self, step):
        model = self.model
        facts = {
            "parameters": [(n, tuple(p.shape), p.numel(), p.requires_grad) for n, p in model.named_parameters()],
            "buffers": [(n, tuple(b.shape), b.dtype) for n, b in model.named_buffers()],
            "modules": [(n, type(m).__name__ if n else "", m.training) for n, m in model.named_modules()],
            "decayed": [name for name, p in model.named_parameters() if p.dim() > 1],
            "count": sum(p.numel() for p in self.parameters if p.requires_grad),
            "grouped": [p is q for p, q in zip(self.grouped, self.parameters)],
            "own": [module.out_features for module in model if isinstance(module, nn.Linear)],
            "length": len(model),
        }
        self.found[repr(facts)] = NOTHING


class Freezing(Loop):
    def begin(self, step):
        for name, parameter in self.model.named_parameters():
            if name.startswith("2.") and step == 1:
                parameter.requires_grad_(False)


class FreezingAtOnce(Loop):
    def prepared(self):
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = not name.startswith(("0.", "5."))


class FreezingStart(Loop):
    """All of a stage, whose activations then need no gradient."""

    def begin(self, step):
        if step == 1:
            for index in (0, 2, 3):
                self.model[index].requires_grad_(False)


class FreezingOnce(Loop):
    def begin(self, step):
        for name, parameter in self.model.named_parameters():
            if name.endswith("weight"):
                parameter.requires_grad_(step != 1)


class FreezingAll(Loop):
    def begin(self, step):
        self.model.requires_grad_(step != 1)


class Thawing(Loop):
    make = staticmethod(frozen_ends)

    def begin(self, step):
        if step == 1:
            self.model.requires_grad_(True)


class ThawingOne(Loop):
    make = staticmethod(frozen_ends)

    def begin(self, step):
        dict(self.model.named_parameters())["7.bias"].requires_grad = step == 1


class Scaled(Loop):
    def reduced(self, step):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ScaledByName(Loop):
    def reduced(self, step):
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias") and parameter.grad is not None:
                parameter.grad *= 0.5


class ScaledInGroups(Loop):
    def reduced(self, step):
        for parameter in self.grouped:
            parameter.grad.div_(torch.tensor(3.0))


class ClippedByValue(Loop):
    def reduced(self, step):
        nn.utils.clip_grad_value_(self.parameters, 0.01)


class Cleared(Loop):
    """The gradients of one layer are thrown away, and all by the model after the step."""

    def reduced(self, step):
        for name, parameter in self.model.named_parameters():
            if name.startswith("5."):
                parameter.grad = None

    def stepped(self, step):
        self.model.zero_grad()


class Shrunk(Loop):
    def stepped(self, step):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(0.9)


class Clamped(Loop):
    def stepped(self, step):
        for parameter in self.parameters:
            parameter.data.clamp_(-0.2, 0.2)


class Masked(Loop):
    """Weights and gradients are pruned by masks that are drawn in the loop."""

    def reduced(self, step):
        for parameter in self.parameters:
            if parameter.dim() == 2:
                mask = (torch.rand(parameter.shape) > 0.5).float()
                parameter.data.mul_(mask)
                parameter.grad.mul_(mask)


class Reset(Loop):
    """A layer is set back in the middle of the training."""

    def stepped(self, step):
        if step == 1:
            nn.init.zeros_(self.model[7].weight)
            nn.init.constant_(self.model[5].bias, 0.1)


class RatesChanged(Loop):
    def begin(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)


class Scheduled(Loop):
    """A scheduler that is made after ``prepare``."""

    def prepared(self):
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def stepped(self, step):
        self.scheduler.step()


class GroupAdded(Loop):
    def optimizer(self, model):
        return optim.SGD(list(model.parameters())[:-2], lr=0.1)

    def prepared(self):
        own = [parameter for name, parameter in self.model.named_parameters() if name.startswith("7.")]
        self.optimizer.add_param_group({"params": own, "lr": 0.01})


class ModuleAdded(Loop):
    def prepared(self):
        self.optimizer.add_param_group({"params": nn.Linear(4, 4).parameters()})


class Replaced(Loop):
    """A layer is replaced by another."""

    def prepared(self):
        torch.manual_seed(9)
        self.model[7] = nn.Linear(53, 4)


class Method(Loop):
    """Attributes and methods of the user's own class."""

    class Net(nn.Sequential):
        rate = 0.5

        def ends(self):
            return self[0], self[7]

        def train(self, mode=True):
            super().train(mode)
            self[3].eval()
            return self

    def make(self):
        return self.Net(*layers())

    def begin(self, step):
        self.model.eval()
        self.model.train()
        for layer in self.model.ends():
            layer.bias.requires_grad_(self.model.rate < 1)
        self.found[f"{[m.training for m in self.model]} {bool(self.model)}"] = NOTHING


class Constrained(Loop):
    """Layers are told apart by type, and their weights bounded."""

    def stepped(self, step):
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.clamp_(min=-0.1)


class MomentumChanged(Loop):
    def stepped(self, step):
        for state in self.optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)


class MomentumForgotten(Loop):
    def stepped(self, step):
        if step == 1:
            self.optimizer.state.clear()


class MomentumNamed(Loop):
    def stepped(self, step):
        self.found[str(sorted({key for each in self.optimizer.state.values() for key in each}))] = NOTHING


class MomentumMeasured(Loop):
    def stepped(self, step):
        state = self.optimizer.state
        self.found[f"norm {step}"] = sum(each["momentum_buffer"].double().norm() for each in state.values())


class ClippedByNorm(Loop):
    def reduced(self, step):
        nn.utils.clip_grad_norm_(self.parameters, 0.1)


class ClippedInGroups(Loop):
    def reduced(self, step):
        nn.utils.clip_grad_norm_(self.grouped, 0.1)


class GradientNoise(Loop):
    def reduced(self, step):
        for parameter in self.grouped:
            parameter.grad.add_(torch.randn_like(parameter.grad))


class GradientSigns(Loop):
    def reduced(self, step):
        for parameter in self.parameters:
            parameter.grad = parameter.grad.sign()


class Noise(Loop):
    def stepped(self, step):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(torch.randn_like(parameter) * 0.01)


class NoiseInGroups(Loop):
    def stepped(self, step):
        with torch.no_grad():
            for parameter in self.grouped:
                parameter.add_(torch.randn_like(parameter) * 0.01)


class Assigned(Loop):
    def stepped(self, step):
        for parameter in self.parameters:
            parameter.data = parameter.data * 0.9


class Vector(Loop):
    def stepped(self, step):
        self.found[f"vector {step}"] = nn.utils.parameters_to_vector(self.parameters).detach()


class Copied(Loop):
    def prepared(self):
        self.average = copy.deepcopy(self.model)


class Stated(Loop):
    def stepped(self, step):
        state = {f"{name} at {step}": value.clone() for name, value in self.model.state_dict().items()}
        self.found.update(state)


class Loaded(Loop):
    def prepared(self):
        torch.manual_seed(9)
        self.model.load_state_dict(layers().state_dict())


class OptimizerStated(Loop):
    def stepped(self, step):
        self.optimizer.load_state_dict(self.optimizer.state_dict())


class Penalized(Loop):
    def loss(self, output, target):
        return F.cross_entropy(output, target) + 1e-3 * sum(p.square().sum() for p in self.parameters)


class Logged(Loop):
    def reduced(self, step):
        self.found[f"norms {step}"] = torch.stack([p.grad.double().norm() for p in self.parameters])


WORK = (
    *(Named, Freezing, FreezingAtOnce, FreezingStart, FreezingOnce, Scaled, ScaledByName, ScaledInGroups),
    *(ClippedByValue, Cleared, Shrunk, Clamped, Reset, RatesChanged, Scheduled, GroupAdded),
    *(MomentumChanged, MomentumForgotten, Method, Constrained, Loaded, Masked),
)
"""Equal bits in every layout."""
WHOLE = (
    *(ClippedByNorm, ClippedInGroups, GradientNoise, GradientSigns, Noise, NoiseInGroups, Assigned, Vector),
    *(Copied, Stated, OptimizerStated, Penalized, Logged, MomentumNamed, MomentumMeasured),
)
"""Equal bits where a process holds the whole model."""
NEVER = {
    FreezingAll: "Every parameter of the model is frozen",
    Thawing: "was frozen at run.prepare and requires a gradient now",
    ThawingOne: "'7.bias' was frozen at run.prepare and requires a gradient now",
    Replaced: "of the model was replaced, added or taken out after run.prepare",
    ModuleAdded: "that was not a parameter of the model when it was prepared",
}
PROGRAMS = (*WORK, *WHOLE, *NEVER)

ABSENT = "is used outside of the forward pass of its module, where under strategy"
GRADIENT = "was asked for, and under strategy"
STATE = "no process holds the whole state of the optimizer"
READ = "was read, and under strategy"
SHARDED = {
    **NEVER,
    **dict.fromkeys((ClippedByNorm, ClippedInGroups, GradientNoise, GradientSigns, Logged), GRADIENT),
    **dict.fromkeys((Noise, NoiseInGroups, Assigned, Vector, Stated, Penalized, Copied), ABSENT),
    OptimizerStated: STATE,
    MomentumMeasured: READ,
}
PIPELINE = {**SHARDED, Copied: "no process has the values of all stages", MomentumNamed: READ}
SERVERS = {
    **NEVER,
    **dict.fromkeys((ClippedByNorm, ClippedInGroups, GradientNoise, GradientSigns, Logged), GRADIENT),
    **dict.fromkeys((MomentumNamed, MomentumMeasured), READ),
    OptimizerStated: STATE,
}
REFUSED = {
    "ddp": NEVER,
    "dp": {**NEVER, Penalized: "The loss uses the parameter"},
    "layers": NEVER,
    "fsdp": SHARDED,
    "fsdp-3": SHARDED,
    "server": SERVERS,
    "servers": SERVERS,
    "pipeline": PIPELINE,
    "data-pipeline": PIPELINE,
    "fsdp-pipeline": PIPELINE,
}
"""The sentences in which a program ends; all others have the bits of ``single``."""
STAGED = ("pipeline", "data-pipeline", "fsdp-pipeline")
"""Layouts in which the loss runs on some ranks only."""


@cache
def alone():
    return dict(zip(PROGRAMS, outcomes(PROGRAMS, "single"), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", REFUSED)
def test_a_loop_has_the_bits_of_one_device_or_is_refused(layout):
    programs = [each for each in PROGRAMS if not (layout in STAGED and each is Penalized)]
    expected = [alone()[each] for each in programs]
    require_ends(programs, expected, outcomes(programs, layout, 200), layout, REFUSED[layout])


def penalized(world, settings):
    return Penalized().train(world, settings)


@pytest.mark.parametrize("layout", [STAGED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in STAGED[1:])])
def test_a_loss_that_uses_parameters_of_other_stages_is_refused(layout):
    """The rank that computes the loss says so; the others are in the middle of their step, and end with it."""
    with pytest.raises(ConfigError, match=ABSENT):
        run_ranks(penalized, LAYOUTS[layout].world, LAYOUTS[layout].settings, timeout=60)
