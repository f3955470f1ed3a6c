"""Habits of research code, each in a loop of its own: the bits of ``single`` on every layout, also after a stop."""

import dataclasses

import pytest
from tests.sameness.drawing import SINGLE
from tests.sameness.programs import compare
from tests.sameness.trials import Layout, Worlds, run_trial

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

RECIPE = {"global_batch": 16, "micro_batches": 8, "seed": 3, "threads": 1}
EPOCHS = 3
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, torch.arange(40) % 4)


def layers(*more):
    torch.manual_seed(5)
    ends = [nn.Linear(6, 40), nn.ReLU()], [nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)]
    return nn.Sequential(*ends[0], *more, *ends[1])


def begun(step):
    pass


def ended(optimizer, loss):
    optimizer.step()
    optimizer.zero_grad()
"""
TRAIN = """

def train(run, epochs):
    global found, model
    found = {}
    model, optimizer, *schedulers = make()
    model, optimizer, *schedulers = run.prepare(model, optimizer, *schedulers)
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            step = run.position.step
            begun(step)
            loss = run.backward(batch, F.cross_entropy)
            found[f"e{epoch}s{step} loss"] = float(loss).hex()
            ended(optimizer, loss)
            found[f"e{epoch}s{step} rates"] = [group["lr"] for group in optimizer.param_groups]
            for scheduler in schedulers[:1]:
                scheduler.step()
        for scheduler in schedulers[1:]:
            scheduler.step(run.evaluate(data, F.cross_entropy))
    found["fingerprint"] = run.fingerprint()
    return found
"""
ADAPTED = """
class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 40) / 10), nn.Parameter(torch.zeros(40, 4))
    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()
def make():
    model = layers()
    model[2] = Adapted(model[2])
    groups = [{"params": [model[2].down, model[2].up], "lr": 0.05}, {"params": model[4].parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.01)
"""
OWN_STEP = """
class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                state["slow"] = state.get("slow", p.clone())
                p.add_(mean.mul(0.9).add_(p.grad).sign_(), alpha=-group["lr"] / (self.calls + group["count"]))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                if self.calls % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
def make():
    model = layers()
    return model, Lion(model.parameters(), 0.02)
"""
SCHEDULES = """
def make():
    model = layers(nn.Dropout(0.2))
    groups = [{"params": model[:2].parameters(), "lr": 0.05}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: min(1, (t + 1) / 4), lambda t: 0.9**t])
    return model, optimizer, by_step, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
"""
ROUTED = """
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(40, 4)
        self.experts = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
    def forward(self, x):
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, place, None])
        return x + out
def make():
    model = layers(Routed())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
"""
UNFROZEN = """
def make():
    model = layers()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def begun(step):
    for number, child in enumerate(model):
        child.requires_grad_(number >= 4 - step)
def ended(optimizer, loss):
    if loss > 1.38:  # leaves a step out
        optimizer.zero_grad()
        return
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "LoRA": ADAPTED,
    "own optimizer": OWN_STEP,
    "schedules": SCHEDULES,
    "experts": ROUTED,
    "unfreezing": UNFROZEN,
}
FSDP = Layout("fsdp 3", 3, {"strategy": "fsdp"})
PIPELINE = Layout("pipeline 2", 2, {"strategy": "pipeline"})
SERVERS = Layout("server 3/2", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 2}})
BOTH = Layout("fsdp x pipeline", 4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"})
PHASES = [[FSDP], [PIPELINE], [SERVERS], [BOTH]]


def stopped(layout, step):
    return dataclasses.replace(layout, stop=step)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_habit_of_research_code_has_the_bits_of_one_device(name):
    text = BEGIN + PROGRAMS[name] + TRAIN
    with Worlds() as worlds:
        expected = run_trial(text, [SINGLE], 40, worlds)
        assert expected.how == "ran", expected
        restarts = [[stopped(FSDP, 1), PIPELINE], [stopped(BOTH, 2), SINGLE], [stopped(SINGLE, 4), SERVERS]]
        for phases in PHASES + restarts:
            verdict = compare(expected, run_trial(text, phases, 40, worlds), phases[-1])
            assert verdict.what == "equal", ([each.name for each in phases], verdict.said, verdict.traceback)
