"""Gradients are views of memory that the next step uses again, unless user code keeps them; those that are not cleared
are added to where they lie."""

import gc
import logging

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

STEPS = 4
WAYS = {
    "shared memory": {},
    "collectives": {"shared_memory": False},
    "ring": {"reduce": "ring"},
    "bf16": {"reduce": "bf16"},
    "powersgd": {"reduce": "powersgd"},
    "fsdp": {"strategy": "fsdp"},
    "rows of a hybrid": {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"},
}
KEEP = {
    "nothing": lambda gradient: None,
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[1:],
    "an array": lambda gradient: gradient.numpy(),
}


def addresses_and_kept(world, ways, keep):
    """By way: where the first gradient lay after each step, and what was kept of it beside a copy made at once."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return {way: _train(world, WAYS[way], KEEP[keep]) for way in ways}


def is_one_tensor(world, ways):
    """By way: whether a parameter's gradient, set to zeros after each step, is one tensor from the first step on."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for way in ways:
        run, optimizer, first, data = _prepared(world, WAYS[way])
        gradients = []
        for batch in run.batches(data):
            run.backward(batch, nn.functional.cross_entropy)
            gradients.append(first.grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        run.close()
        found[way] = len({id(each) for each in gradients})
    return found


def _prepared(world, options):
    """A run, its optimizer, the first parameter of which this rank has rows, and data of four steps."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(**{"global_batch": 8, "micro_batches": 4, "threads": 1, **options}), world)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = next(iter(run.strategy.trainable().values()))
    data = torch.utils.data.TensorDataset(
        torch.randn(8 * STEPS, 64), torch.randint(3, (8 * STEPS,), generator=torch.Generator().manual_seed(1))
    )
    return run, optimizer, first, data


def _train(world, options, keep):
    run, optimizer, first, data = _prepared(world, options)
    places, kept = [], []
    for batch in run.batches(data):
        run.backward(batch, nn.functional.cross_entropy)
        places.append(first.grad.untyped_storage().data_ptr())
        kept.append((keep(first.grad), keep(first.grad.clone())))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    run.close()
    same = [bool((one == other).all()) for one, other in kept if one is not None]
    return len(set(places)), same


WORLDS = pytest.mark.parametrize(
    ("world_size", "ways"), [(2, tuple(WAYS)[:-1]), (4, tuple(WAYS)[-1:])], ids=["2 ranks", "4 ranks"]
)


@WORLDS
def test_a_gradient_that_is_not_cleared_stays_one_tensor(world_size, ways):
    """As with torch: code that has a list of all gradients finds in it those of every later step."""
    for found in run_ranks(is_one_tensor, world_size, ways):
        assert found == dict.fromkeys(ways, 1)


@WORLDS
@pytest.mark.parametrize("keep", KEEP)
def test_memory_is_used_again_unless_user_code_keeps_a_gradient(world_size, ways, keep):
    for found in run_ranks(addresses_and_kept, world_size, ways, keep):
        for way, (memories, same) in found.items():
            if way != "fsdp":  # FSDP's own memory, new in each step
                assert memories == (1 if keep == "nothing" else STEPS), way
            assert same == [True] * (0 if keep == "nothing" else STEPS), way
