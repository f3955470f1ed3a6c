"""Mistakes in the model, the loss or the loop of a run of Lockstep's, and what verify says about them."""

import contextlib
import dataclasses

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import dataset, network
from torch import nn
from torch.nn import functional

import lockstep
from lockstep.run import RunOptions
from lockstep.verify import Cause
from lockstep.verify.diagnosis import diagnose
from lockstep.verify.plain.recorder import StopRecording
from lockstep.verify.rank import Observer

OFF = {"checks": "off"} if "checks" in {each.name for each in dataclasses.fields(RunOptions)} else {}
"""The checks of the first steps refuse some of these programs, and verify must name what they do all the same."""


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class RunningScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 1.0

    def forward(self, output, target):
        loss = functional.cross_entropy(output, target)
        scaled = loss / self.mean
        self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
        return scaled


class Jumping(nn.Module):
    def forward(self, x):
        return x + 0.1 * x**2 * torch.distributed.is_initialized()


"""Depends on the layout by something that nobody records."""


def sound(world):
    return {}


def a_counter_in_the_model(world):
    return {"layer": Counter()}


def a_generator_in_the_model(world):
    return {"layer": Drawing()}


def one_rank_in_eval_mode(world):
    return {"layer": nn.Dropout(0.5), "change": lambda model: world.rank == 1 and model.eval()}


def a_learning_rate_times_the_number_of_ranks(world):
    return {"lr": 0.1 * world.world_size}


def class_weights_of_the_own_share(world):
    return {"loss": nn.CrossEntropyLoss(weight=torch.arange(1.0, 4) + world.rank * torch.arange(2.0, -1, -1))}


def a_loss_with_state(world):
    return {"loss": RunningScale()}


def something_that_nobody_records(world):
    return {"layer": Jumping()}


CASES = {
    sound: (None, ""),
    a_counter_in_the_model: (Cause.HIDDEN_STATE, "'0.calls' is"),
    a_generator_in_the_model: (Cause.HIDDEN_STATE, "'0.generator' is generator"),
    one_rank_in_eval_mode: (Cause.MODE, "'0' is in eval mode on rank 1"),
    a_learning_rate_times_the_number_of_ranks: (Cause.LEARNING_RATE, "0.2"),
    class_weights_of_the_own_share: (Cause.LOSS, "times as large"),
    a_loss_with_state: (Cause.LOSS, "times as large"),
    something_that_nobody_records: (Cause.OUTPUT, "times as large"),
}

UNCERTAIN = (Cause.LOSS, Cause.OUTPUT)


def traces(world):
    return [trace(world, **case(world)) for case in CASES]


def trace(world, layer=None, change=lambda model: None, lr=0.1, loss=None):
    torch.manual_seed(0)
    model = nn.Sequential(*([layer] if layer is not None else []), *network())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run = lockstep.init(global_batch=24, micro_batches=4, **OFF)
    model, optimizer = run.prepare(model, optimizer)
    observer = Observer(run, f"{world.world_size}", 2)
    change(model)
    with contextlib.suppress(StopRecording):
        for _ in run.epochs(1):
            for batch in run.batches(dataset(53)):
                run.backward(batch, loss or nn.CrossEntropyLoss())
                optimizer.step()
                optimizer.zero_grad()
    run.close()
    return observer.trace


@pytest.fixture(scope="module")
def recorded():
    return [dict(zip(CASES, run_ranks(traces, ranks)[0])) for ranks in (1, 2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_cause_of_a_mistake_in_a_run_is_named(case, recorded):
    reference, other = (each[case] for each in recorded)
    found = diagnose(reference, other)
    cause, said = CASES[case]
    assert (found and found.cause) is cause, found
    if found:
        assert said in found.text
        assert bool(found.possible) is (cause in UNCERTAIN)
