"""A small job for the tests of the handle: BatchNorm, dropout, a last step with one short micro-batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.fingerprint import digest_tensors

SAMPLES, GLOBAL_BATCH = 53, 24


def dataset(samples=SAMPLES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def correct(output, target):
    return output.argmax(1) == target


def begin(model=None, make_optimizer=torch.optim.SGD, make_scheduler=None, lr=0.1, **options):
    """A prepared run: (run, model, optimizer) or (run, model, optimizer, scheduler)."""
    run = lockstep.init(**{"global_batch": GLOBAL_BATCH, "micro_batches": 8, **options})
    model = network() if model is None else model
    optimizer = make_optimizer(model.parameters(), lr=lr)
    scheduler = [make_scheduler(optimizer)] if make_scheduler else []
    return run, *run.prepare(model, optimizer, *scheduler)


def train_step(run, batch, optimizer, loss=nn.functional.cross_entropy):
    value = run.backward(batch, loss)
    optimizer.step()
    optimizer.zero_grad()
    return value


class Left(Exception):
    """Raised by ``leave``."""


def leave(run):
    """Saves and closes a run in the middle of its loop, as one that is stopped does."""
    run.save(wait=True)
    run.close()
    raise Left


def whole_state(run, model, optimizer, *schedulers):
    """Digests of every parameter, buffer and optimizer tensor, and all numbers beside them."""
    tensors = dict(model.state_dict())
    numbers = {}
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{index}.{key}"] = value
    groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    scaler = run._precision.scaler.state_dict() if run._precision.scaler else {}
    states = [in_order(each.state_dict()) for each in schedulers]
    position = run.position.as_dict()
    return digest_tensors(tensors), repr(numbers), groups, scaler, states, position["epoch"], position["step"]


def in_order(state):
    """Text that is equal where dicts are, in whatever order their keys came; functions by their place only."""
    if isinstance(state, dict):
        return "{" + ", ".join(f"{key}: {in_order(state[key])}" for key in sorted(state, key=str)) + "}"
    if isinstance(state, list | tuple):
        return "[" + ", ".join(map(in_order, state)) + "]"
    return "a function" if callable(state) else repr(state)
