"""Leftovers of a stopped run are there in whatever layout it goes on: gradients, numbers that are attributes."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import LAYOUTS
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions
from lockstep.runtime import Callback
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(900)
CHAIN = (
    *(
        "single",
        "fsdp-3",
        "pipeline",
        "ddp",
        "servers",
        "fsdp-pipeline",
        "dp",
        "fsdp",
        "data-pipeline",
        "server",
    ),
    *("layers", "fsdp-3", "server", "pipeline", "single"),
)
STEPS_EACH = 2


def block(width=36):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Scaled(nn.Module):
    """Multiplies by a number that is no buffer."""

    def __init__(self):
        super().__init__()
        self.rate = 1.0

    def forward(self, x):
        return x * self.rate


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 36), block(), nn.Dropout(0.1), block(), Scaled(), nn.Linear(36, 3))


def all_parameters(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


class Warming(torch.optim.SGD):
    """Keeps the number of its steps where no ``state_dict`` has it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * min(self.steps, 20)
        return super().step(closure)


class Listing(torch.optim.SGD):
    """Keeps its last rates in a list, from which the next follows."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.rates = [lr]

    def step(self, closure=None):
        self.rates[:] = [*self.rates[-3:], sum(self.rates) / 3]
        for group in self.param_groups:
            group["lr"] = min(self.rates[-1], 0.05)
        return super().step(closure)


def listing(model):
    return [Listing(model.parameters(), lr=0.01)]


def counting(model):
    return [Warming(model.parameters(), lr=0.01)]


def some_parameters(model):
    """The gradients of the others are added up for ever."""
    return [torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)]


def always(model, optimizers, step):
    for each in optimizers:
        each.step()
        each.zero_grad()


def kept(model, optimizers, step):
    """Gradients are cleared in every third step only, and so added up over the others."""
    for each in optimizers:
        each.step()
        if step % 3 == 0:
            each.zero_grad()


def zeros(model, optimizers, step):
    for each in optimizers:
        each.step()
        each.zero_grad(set_to_none=False)


def by_hand(model, optimizers, step):
    for each in optimizers:
        each.step()
    for parameter in model.parameters():
        parameter.grad = None


def annealed(model, optimizers, step):
    always(model, optimizers, step)
    for module in model.modules():
        if isinstance(module, Scaled):
            module.rate *= 0.9


LOOPS = {
    "some owned": (some_parameters, always),
    "kept": (all_parameters, kept),
    "zeros": (all_parameters, zeros),
    "counting": (counting, always),
    "listing": (listing, always),
    "annealed": (all_parameters, annealed),
    "by hand": (all_parameters, by_hand),
}


@pytest.mark.slow
def test_what_a_loop_leaves_goes_on_under_every_layout(tmp_path):
    last = STEPS_EACH * len(CHAIN)
    (whole,) = run_ranks(train_all, 1, tmp_path / "whole", {"strategy": "single"}, last)
    for number, name in enumerate(CHAIN, 1):
        layout = LAYOUTS[name]
        stop = number * STEPS_EACH
        found = run_ranks(train_all, layout.world, tmp_path / "changing", layout.settings, stop, timeout=200)[0]
    for loop, digests in whole.items():
        different = [key for key in {*digests, *found[loop]} if digests.get(key) != found[loop].get(key)]
        assert not different, f"{loop}: {different[:5]}"
    assert any(key.startswith("gradient|") for key in whole["some owned"])


def train_all(world, folder, settings, stop):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return {loop: train(world, folder / loop, settings, stop, *LOOPS[loop]) for loop in LOOPS}


def train(world, folder, settings, stop, make_optimizers, update):
    options = {"global_batch": 8, "micro_batches": 4, "seed": 3, "threads": 1, "resume": "auto"}
    run = Run(RunOptions.of(**{**options, "directory": str(folder), **settings}), world)
    model = network()
    model, *optimizers = run.prepare(model, *make_optimizers(model))
    numbers = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(40, 6, generator=numbers), torch.randint(3, (40,), generator=numbers)
    )
    state = {}
    for _ in run.epochs(1000):
        for batch in run.batches(data):
            run.backward(batch, nn.functional.cross_entropy)
            update(model, optimizers, batch.plan.step)
            if batch.plan.step + 1 == stop:
                run.save()
                captured = run.require_prepared().state.capture(run.fingerprint(), keep=world.is_main)
                state = {name: t.clone() for name, t in {**captured.model, **captured.optimizer}.items()}
                break
        if run.position.step >= stop:
            break
    run.close()
    return digest_tensors(state)


class StopAsked(Callback):
    """Asks the run to stop in its first step, as SIGTERM does."""

    def __init__(self, run):
        self.control = run._session.heartbeat.control

    def on_step_begin(self, batch):
        if batch.plan.step == 0:
            self.control.request_stop(StopReason.PREEMPTED)


def stop_between_steps_of_the_second(world, directory, settings, saves):
    """The step after which ranks have stopped, or what is said; the second optimizer steps after every third batch."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    options = {"global_batch": 12, "micro_batches": 6, "seed": 3, "threads": 1, **settings}
    run = Run(RunOptions.of(**options, directory=directory), world)
    model = network()
    parameters = list(model.parameters())
    first, second = (torch.optim.SGD(part, lr=0.1) for part in (parameters[:-2], parameters[-2:]))
    _, first, second = run.prepare(model, first, second)
    if not saves:
        run.add_callback(StopAsked(run))
    data = TensorDataset(torch.randn(72, 6, generator=torch.Generator().manual_seed(1)), torch.arange(72) % 3)
    try:
        for batch in run.batches(data):
            run.backward(batch, nn.functional.cross_entropy)
            for optimizer in (first, second) if batch.plan.step % 3 == 2 else (first,):
                optimizer.step()
                optimizer.zero_grad()
            if saves:
                run.save()
    except (Stopped, ConfigError) as ended:
        return run.position.step if isinstance(ended, Stopped) else str(ended)[:60]
    finally:
        run.close()
    return "to the end"


@pytest.mark.parametrize(
    "layout",
    ["pipeline", *(pytest.param(each, marks=pytest.mark.slow) for each in ("servers", "fsdp-pipeline"))],
)
def test_all_ranks_stop_after_one_step_where_only_some_hold_gradients(layout, tmp_path):
    world, settings = LAYOUTS[layout].world, LAYOUTS[layout].settings
    body = stop_between_steps_of_the_second
    assert run_ranks(body, world, str(tmp_path), settings, False, timeout=30) == [3] * world
    said = run_ranks(body, world, str(tmp_path), settings, True, timeout=30)
    assert said == ["run.save() between run.backward and optimizer.step() is refu"] * world
