"""Gradients are views of memory that the next step uses again, unless user code keeps them; those that are not cleared
are added to where they lie."""

import gc
import logging
import os

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


def as_another_process_has_it(gradient):
    """A tensor over the memory that is mapped where a gradient was sent through a queue."""
    descriptor, size = gradient.untyped_storage()._share_fd_cpu_()
    mapped = torch.UntypedStorage._new_shared_fd_cpu(os.dup(descriptor), size)
    place = gradient.storage_offset(), gradient.shape, gradient.stride()
    return torch.empty(0, dtype=gradient.dtype).set_(mapped, *place)


KEEP = {
    "nothing": lambda gradient: None,
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[1:],
    "an array": lambda gradient: gradient.numpy(),
    "in another process": as_another_process_has_it,
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


def other_gradients_written(world, ways):
    """By way: the gradient of a loss that saved one of the model's, before others of that bucket were written to."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for way in ways:
        run, _, first, data = _prepared(world, WAYS[way])
        for batch in run.batches(data):
            run.backward(batch, nn.functional.cross_entropy)
            factor = torch.ones((), requires_grad=True)
            loss = (factor.expand(first.shape) * first.grad).sum()
            for parameter in run.strategy.trainable().values():
                if parameter is not first and parameter.grad is not None:
                    parameter.grad.mul_(2)
            loss.backward()
            found[way] = torch.equal(factor.grad, first.grad.sum())
        run.close()
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
    ("world_size", "ways"),
    [(2, tuple(WAYS)[:-1]), pytest.param(4, tuple(WAYS)[-1:], marks=pytest.mark.slow)],
    ids=["2 ranks", "4 ranks"],
)


@WORLDS
def test_a_gradient_that_is_not_cleared_stays_one_tensor(world_size, ways):
    """As with torch: code that has a list of all gradients finds in it those of every later step."""
    for found in run_ranks(is_one_tensor, world_size, ways):
        assert found == dict.fromkeys(ways, 1)


@WORLDS
@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(
            each,
            marks=[pytest.mark.slow] * (each in ("an array", "a view", "the gradient", "in another process")),
        )
        for each in KEEP
    ],
)
def test_memory_is_used_again_unless_user_code_keeps_a_gradient(world_size, ways, keep):
    for found in run_ranks(addresses_and_kept, world_size, ways, keep):
        for way, (memories, same) in found.items():
            if way == "fsdp" or keep == "in another process":
                pass  # new memory in each step
            elif keep != "nothing":
                assert memories == STEPS, way
            elif way not in ("collectives", "ring"):  # there a thread of gloo lets go of it when it likes
                assert memories == 1, way
            assert same == [True] * (0 if keep == "nothing" else STEPS), way


def test_a_write_to_one_gradient_is_none_to_the_others():
    ways = [way for way in WAYS if "strategy" not in WAYS[way]]
    for found in run_ranks(other_gradients_written, 2, ways):
        assert found == dict.fromkeys(ways, True)
