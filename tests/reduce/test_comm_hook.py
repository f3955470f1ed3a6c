"""The communication hook for torch's DistributedDataParallel, on real ranks."""

import functools

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.core.fingerprint import combine, digest_tensors
from lockstep.errors import ConfigError
from lockstep.reduce import OrderedHookState, ordered_hook

STEPS, ROWS = 12, 8


class Branching(nn.Module):
    """Convolutions, and one layer that some samples' batches do not reach."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 16, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.body(x))


def build(channels_last=False):
    torch.manual_seed(3)
    model = Branching()
    return model.to(memory_format=torch.channels_last) if channels_last else model


def data(world_size):
    generator = torch.Generator().manual_seed(5)
    rows = ROWS * world_size * STEPS
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(5, (rows,), generator=generator)


def train_with_torch(world, *, hook=True, bucket_cap_mb=0.01, as_view=False, find_unused=False):
    model = build()
    model.never.requires_grad_(find_unused)
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=find_unused,
    )
    if hook:
        ddp.register_comm_hook(OrderedHookState(), ordered_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = data(world.world_size)
    for step in range(STEPS):
        start = (step * world.world_size + world.rank) * ROWS
        part = slice(start, start + ROWS)
        nn.functional.cross_entropy(ddp(inputs[part]), targets[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return combine(digest_tensors(model.state_dict()))


def train_with_lockstep(world):
    run = lockstep.init(global_batch=ROWS * world.world_size, micro_batches=world.world_size)
    model = build()
    model.never.requires_grad_(False)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    dataset = torch.utils.data.TensorDataset(*data(world.world_size))
    for batch in run.batches(dataset, shuffle=False):
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return run.fingerprint()


def channels_last_gradients(world, hook):
    model = build(channels_last=True)
    model.never.requires_grad_(False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    if hook:
        ddp.register_comm_hook(OrderedHookState(), ordered_hook)
    inputs, targets = data(world.world_size)
    part = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
    for _ in range(2):  # the buckets of the second pass are other ones
        model.zero_grad()
        nn.functional.cross_entropy(ddp(inputs[part]), targets[part]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def all_ways(world):
    return {
        "lockstep": train_with_lockstep(world),
        "hook": train_with_torch(world),
        "one bucket": train_with_torch(world, bucket_cap_mb=25),
        "many buckets, gradients as views of them": train_with_torch(world, bucket_cap_mb=0.001, as_view=True),
        "a parameter without a gradient": train_with_torch(world, find_unused=True),
        "no hook": train_with_torch(world, hook=False),
        "channels_last": [channels_last_gradients(world, hook) for hook in (True, False)],
    }


@functools.cache
def results(world_size):
    return run_ranks(all_ways, world_size)


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize(
    "way",
    ["hook", "one bucket", "many buckets, gradients as views of them", "a parameter without a gradient"],
)
def test_ddp_with_the_hook_has_the_bits_of_lockstep_with_one_micro_batch_per_rank(way, world_size):
    expected = results(world_size)[0]["lockstep"]
    assert [each[way] for each in results(world_size)] == [expected] * world_size


@pytest.mark.slow
def test_ddp_without_the_hook_has_other_bits_on_four_ranks():
    assert results(4)[0]["no hook"] != results(4)[0]["lockstep"]


def test_channels_last_gradients_land_at_their_own_places():
    for each in results(3):
        with_hook, plain = each["channels_last"]
        assert with_hook.keys() == plain.keys()
        for name, gradient in with_hook.items():
            torch.testing.assert_close(gradient, plain[name])
            assert torch.equal(gradient, results(3)[0]["channels_last"][0][name])


def with_a_wrong_state(world):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(None, ordered_hook)
    with pytest.raises(ConfigError, match="NoneType as its state"):
        ddp(torch.zeros(1, 2)).sum().backward()


@pytest.mark.slow
def test_a_missing_state_is_named():
    run_ranks(with_a_wrong_state, 2)


def test_the_state_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group first"):
        OrderedHookState()
