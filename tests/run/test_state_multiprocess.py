"""Stopped anywhere and resumed on another number of ranks, a run ends as if it had never stopped."""

import logging
import os
import signal

import pytest
import torch
from tests.ranks import RankFailed, run_ranks
from tests.run.jobs import begin, correct, dataset, train_step, whole_state
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from lockstep.errors import LockstepError
from lockstep.run import Run, RunOptions

EPOCHS, STEPS = 3, 3
STOPS = range(1, EPOCHS * STEPS + 1)
SOME_STOPS = (2, 3, 7, 9)
"""Within epochs and at their ends; ``make test-all`` has them all."""
RECIPES = {
    "fp16, AdamW": {"precision": "fp16", "make_optimizer": torch.optim.AdamW, "lr": 0.01},
    "fp32, SGD": {
        "make_optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)
    },
}


def train(recipe, directory=None, stop=None, die=None, rank=0):
    """The whole state at the end, and which epochs were evaluated; None if it was stopped."""
    run, model, optimizer, scheduler = begin(
        directory=directory,
        resume="auto" if directory else "",
        make_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS * STEPS),
        **RECIPES[recipe],
    )
    evaluated = []
    for epoch in run.epochs(EPOCHS):
        for batch in run.batches(dataset()):
            run.backward(batch, torch.nn.functional.cross_entropy)
            run.clip_gradients(0.5)
            if batch.plan.step == die and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if die is not None:
                run.save()
            if batch.plan.step + 1 == stop:
                run.save()
                return None
        evaluated.append((epoch, run.evaluate(dataset(seed=2), correct)))
    return whole_state(run, model, optimizer, scheduler), evaluated


def train_all(world, recipe, jobs):
    return [train(recipe, **job, rank=world.rank) for job in jobs]


@pytest.mark.parametrize(
    ("recipe", "stops"),
    [
        ("fp32, SGD", SOME_STOPS),
        *(pytest.param(recipe, STOPS, marks=pytest.mark.slow) for recipe in RECIPES),
    ],
)
@pytest.mark.fault("K9", "P5")
def test_a_run_stopped_at_any_step_ends_like_the_one_that_never_stopped(recipe, stops, tmp_path):
    ((whole,),) = run_ranks(train_all, 1, recipe, [{}])
    folders = [str(tmp_path / str(number)) for number in stops]
    jobs = [{"directory": folder, "stop": stop} for folder, stop in zip(folders, stops, strict=True)]
    assert run_ranks(train_all, 2, recipe, jobs) == [[None] * len(stops)] * 2
    for rank in run_ranks(train_all, 3, recipe, [{"directory": folder} for folder in folders]):
        for stop, (state, evaluated) in zip(stops, rank, strict=True):
            assert state == whole[0]
            assert evaluated == whole[1][(stop - 1) // STEPS :], "an epoch that ended is evaluated after the resume"


def test_a_run_whose_rank_was_killed_ends_like_the_one_that_never_stopped(tmp_path):
    ((whole,),) = run_ranks(train_all, 1, "fp16, AdamW", [{}])
    with pytest.raises((RankFailed, RuntimeError, LockstepError)):
        run_ranks(train_all, 2, "fp16, AdamW", [{"directory": str(tmp_path), "die": 4}])
    for ((state, evaluated),) in run_ranks(train_all, 4, "fp16, AdamW", [{"directory": str(tmp_path)}]):
        assert state == whole[0]
        assert evaluated == whole[1][1:]


def save_between_epochs(world, directory, epochs):
    run, model, optimizer = begin(directory=directory, resume="auto")
    evaluated = []
    for epoch in run.epochs(epochs):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
        evaluated.append((epoch, run.evaluate(dataset(seed=2), correct)))
        run.save()
    return whole_state(run, model, optimizer), evaluated


@pytest.mark.slow
@pytest.mark.fault("K9")
def test_a_run_saved_after_an_epoch_goes_on_with_the_next(tmp_path):
    whole = run_ranks(save_between_epochs, 2, str(tmp_path / "whole"), 3)[0]
    run_ranks(save_between_epochs, 2, str(tmp_path / "cut"), 2)
    state, evaluated = run_ranks(save_between_epochs, 3, str(tmp_path / "cut"), 3)[0]
    assert state == whole[0]
    assert evaluated == whole[1][2:]


def count_steps(world, directory, strategy, epochs):
    """What this rank warns of in a run whose loop keeps a count, and sets a learning rate before it."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep.run").addHandler(handler)
    run, _, optimizer = begin(directory=directory, resume="auto", strategy=strategy)
    optimizer.param_groups[0]["lr"] = 0.2 / epochs
    seen = 0
    for _ in run.epochs(epochs):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            seen += 1
        run.print(seen)
        run.save()
    run.close()
    return [" ".join(each.split()[:3]) for each in said]


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_rank_0_alone_names_what_a_stop_has_lost(strategy, tmp_path):
    run_ranks(count_steps, 2, str(tmp_path), strategy, 1)
    main, other = run_ranks(count_steps, 2, str(tmp_path), strategy, 2)
    assert main == ["Before its loop", "The loop goes"]
    assert other == []


def gradients_of_nobody(world, settings):
    """Gradients, in a checkpoint, of parameters that no optimizer has; those of two words are zeros."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run = Run(RunOptions.of(global_batch=6, micro_batches=3, seed=0, threads=1, **settings), world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 2))
    model, _ = run.prepare(model, torch.optim.SGD([model[2].weight], lr=0.1))
    words = torch.tensor([[0, 1], [2, 3]] * 3)
    for batch in run.batches(TensorDataset(words, torch.arange(6) % 2)):
        run.backward(batch, nn.functional.cross_entropy)
    state = run.require_prepared().state.capture(run.fingerprint(), keep=True)
    run.close()
    return {name: value for name, value in state.optimizer.items() if name.startswith("gradient|")}


def test_gradients_are_kept_where_a_rank_has_no_rows_of_them_or_zeros_only():
    (whole,) = run_ranks(gradients_of_nobody, 1, {"strategy": "single"})
    assert {*whole} >= {"gradient|0.weight", "gradient|2.bias"}
    for world in (2, 3):
        for found in run_ranks(gradients_of_nobody, world, {"strategy": "fsdp"}):
            for name in ("gradient|0.weight", "gradient|2.bias"):
                assert torch.equal(found[name], whole[name]), (world, name)


class Keeping(nn.Module):
    """Keeps tensors as extra state and in an attribute."""

    def __init__(self):
        super().__init__()
        self.held, self.table = torch.ones(40), torch.ones(200, 40)

    def forward(self, x):
        return x

    def get_extra_state(self):
        return {"held": self.held}

    def set_extra_state(self, state):
        self.held = state["held"]


def memory_of_checkpoint(world):
    """True where a checkpoint's tensors share memory with those of the model, on rank 0."""
    run = Run(RunOptions.of(global_batch=24, micro_batches=8, strategy="pipeline"), world)
    model = nn.Sequential(nn.Linear(6, 40), Keeping(), nn.Linear(40, 3))
    keeping = model[1]
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    keeping.table += 1
    held = run.require_prepared().state.capture("", keep=run.is_main).optimizer
    run.close()
    return {
        name: tensor.data_ptr() in (keeping.held.data_ptr(), keeping.table.data_ptr()) for name, tensor in held.items()
    }


def test_what_modules_keep_beside_the_weights_is_copied_before_it_is_written_in_the_background():
    """Under a strategy whose tensors are gathered nobody copies the rest, and the loop would change it meanwhile."""
    found = run_ranks(memory_of_checkpoint, 2)[0]
    assert sorted(found) == ["attribute|module 1|table", "extra state of 1.held"]
    assert not any(found.values())
